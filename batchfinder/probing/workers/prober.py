"""Probing in child processes that may die. Imports no torch.

A worker that is not back at its baseline, has broken its CUDA context, or died is replaced. Where a
probe leaves traces each confirmation gets a fresh one; elsewhere workers start over by themselves.
"""

from __future__ import annotations

from batchfinder.errors import BatchTooSmallError, UserCodeError
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.source import SetupSource
from batchfinder.probing.workers.supervisor import LOADING_SECONDS, Supervisor
from batchfinder.probing.workers.verdict import Verdict
from batchfinder.results.result import Probe


class WorkerProber:
    """Tries sizes in worker processes; see :class:`~batchfinder.search.prober.Prober`.

    Args:
        source: where a worker gets the setup from.
        options: of the search.
        probe_timeout_seconds: after which a probe is taken for hung; None: by the steps seen.
        loading_timeout_seconds: after which loading the setup is taken for hung.
        show_output: whether what the user's code prints is passed on to standard error.

    Raises:
        BatchFinderError: what the worker raised on loading the setup.
        UserCodeError: the user's code raised on loading.
        WorkerError: the worker died on loading, or did not come to an end.
    """

    def __init__(
        self,
        source: SetupSource,
        options: ProbeOptions,
        *,
        probe_timeout_seconds: float | None = None,
        loading_timeout_seconds: float = LOADING_SECONDS,
        show_output: bool = False,
    ) -> None:
        self._supervisor = Supervisor(
            source,
            options,
            probe_timeout_seconds=probe_timeout_seconds,
            loading_timeout_seconds=loading_timeout_seconds,
            show_output=show_output,
        )
        try:
            ready = self._supervisor.start()
        except BaseException:
            self.close()
            raise
        self._refusals: tuple[str, ...] = ()
        self.device: str = ready["device"]
        self.budget_bytes: int = ready["budget_bytes"]
        self.capacity_bytes: int = ready["capacity_bytes"]
        self.used_by_others_bytes: int = ready["used_by_others_bytes"]
        self.is_repeatable: bool = ready["is_repeatable"]
        self.versions: dict[str, str] = ready["versions"]

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self._supervisor.warnings, *self._refusals)

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        try:
            return self._probe(batch_size, confirm)
        except UserCodeError as error:
            if batch_size > 1:
                raise
            problem = error
        # Not above, where each error that follows would be chained to that one.
        self._blame_the_size(problem)
        raise problem

    def _blame_the_size(self, problem: UserCodeError) -> None:
        """Raise of a batch of one if one of two runs: code that squeezes it fails on the rest."""
        try:
            self._probe(2, confirm=False)
        except UserCodeError:
            return
        fails = f"a batch of 1 fails ({problem}), one of 2 does not"
        self._refusals = (f"{fails}: only sizes from 2 on were tried",)
        raise BatchTooSmallError(f"{fails}; try sizes from 2 on")

    def _probe(self, batch_size: int, confirm: bool) -> Probe:
        # A worker's death, and an OOM in a process that had not got rid of an earlier probe, may
        # have nothing to do with the size: only a second one in a fresh worker is a verdict.
        return self._supervisor.ask_twice(
            lambda: self._attempt(batch_size, confirm), lambda verdict: not verdict.is_certain
        )

    def warn(self, *warnings: str) -> None:
        """Add warnings to those of the result, each once."""
        self._supervisor.warn(warnings)

    def close(self) -> None:
        self._supervisor.close()

    def _attempt(self, batch_size: int, confirm: bool) -> Verdict:
        if confirm and not self.is_repeatable:
            self._supervisor.end_worker()
        if not self._supervisor.has_worker:
            self._supervisor.start()
        verdict = self._supervisor.attempt(batch_size, confirm)
        self._supervisor.take_note(verdict)
        return verdict
