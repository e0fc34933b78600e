"""Probing in child processes that may die: the parent's side. Imports no torch.

A worker loads the setup itself and answers in JSON lines; nothing is unpickled here. A worker that
is not back at its baseline, has broken its CUDA context, or died is replaced; each confirmation
gets a fresh one. A spare worker always imports PyTorch ahead of time, so replacing costs little.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tenacity import RetryCallState, Retrying, retry_if_result, stop_after_attempt

from batchfinder import errors
from batchfinder.errors import (
    BatchFinderError,
    UserCodeError,
    WorkerDiedError,
    WorkerError,
    WorkerGarbledError,
    WorkerHungError,
)
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.process import WorkerProcess
from batchfinder.result import Outcome, Probe
from batchfinder.units import format_seconds

# A step is taken for hung after this long, or after this many times what the slowest step so far
# would take at the size, whichever is longer. The first step may well compile kernels.
PATIENCE_SECONDS = 600.0
PATIENCE_FACTOR = 20.0

# Loading a setup may fetch a large checkpoint from somewhere, but does not take so long.
LOADING_SECONDS = 3600.0


@dataclass(frozen=True)
class SetupSource:
    """Where a worker gets the setup from.

    Attributes:
        target: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``; empty with a pickle.
        arguments: keyword arguments of the target's function.
        sample: what yields the example batch, written as a target; None: see ``find_sample``.
        input_spec: the shapes of an example batch as text; None: see ``find_sample``.
        optimizer: name of a class of ``torch.optim``, in place of the setup's; None: the setup's.
        pickled_setup: a pickled ``TrainingSetup``; empty with a target.
    """

    target: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sample: str | None = None
    input_spec: str | None = None
    optimizer: str | None = None
    pickled_setup: bytes = b""

    def to_order(self) -> dict[str, Any]:
        """The order to load it, without the pickle's bytes, which follow the order's line."""
        if self.pickled_setup:
            # With the places where this process finds the modules of the pickled classes.
            return {
                "pickled_bytes": len(self.pickled_setup),
                "module_path": sys.path,
            }
        return {
            "target": self.target,
            "arguments": dict(self.arguments),
            "sample": self.sample,
            "input_spec": self.input_spec,
            "optimizer": self.optimizer,
        }


class WorkerProber:
    """Tries sizes in worker processes; see :class:`~batchfinder.probing.prober.Prober`.

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
        self.source = source
        self.options = options
        self.warnings: tuple[str, ...] = ()
        self._timeout_seconds = probe_timeout_seconds
        self._loading_seconds = loading_timeout_seconds
        self._show_output = show_output
        self._slowest_seconds_per_sample = 0.0
        self._spare: WorkerProcess | None = None
        self._worker: WorkerProcess | None = None
        try:
            ready = self._start()
        except BaseException:
            self.close()
            raise
        self.device: str = ready["device"]
        self.budget_bytes: int = ready["budget_bytes"]
        self.capacity_bytes: int = ready["capacity_bytes"]
        self.used_by_others_bytes: int = ready["used_by_others_bytes"]
        self.is_repeatable: bool = ready["is_repeatable"]
        self.versions: dict[str, str] = ready["versions"]
        if ready["limit_warning"]:
            self._warn([ready["limit_warning"]])
        # Later workers get the same budget, whatever other processes have taken meanwhile.
        self.options = replace(options, budget_bytes=self.budget_bytes)

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        # A worker's death, and an OOM in a process that had not got rid of an earlier probe, may
        # have nothing to do with the size: only a second one in a fresh worker is a verdict.
        retrying = Retrying(
            retry=retry_if_result(lambda verdict: not verdict.is_certain),
            stop=stop_after_attempt(2),
            sleep=lambda _: self._end_worker(),
            retry_error_callback=_last_verdict,
        )
        verdict: _Verdict = retrying(self._attempt, batch_size, confirm)
        return verdict.probe

    def close(self) -> None:
        self._end_worker()
        if self._spare is not None:
            self._spare.kill()
            self._spare = None

    def _attempt(self, batch_size: int, confirm: bool) -> _Verdict:
        if confirm:
            self._end_worker()
        if self._worker is None:
            self._start()
        worker = self._worker
        assert worker is not None
        started = time.monotonic()
        worker.send({"batch_size": batch_size, "confirm": confirm})
        steps = 0
        try:
            while True:
                answer = worker.receive(self._patience(batch_size, started))
                if answer["answer"] != "step":
                    break
                steps += 1
        except (WorkerDiedError, WorkerGarbledError, WorkerHungError) as end:
            self._end_worker()
            seconds = time.monotonic() - started
            return _verdict_of_death(end, batch_size, confirm, steps, seconds)
        if answer["answer"] != "probe":
            self._end_worker()
            raise _error(answer)
        self._warn(answer["warnings"])
        if confirm or not answer["is_clean"]:
            self._end_worker()
        probe = Probe.from_dict(answer["probe"])
        if probe.step_seconds:
            per_sample = probe.step_seconds / batch_size
            self._slowest_seconds_per_sample = max(self._slowest_seconds_per_sample, per_sample)
        if probe.fits and self.options.warm_up_batch_size is None:
            self.options = replace(self.options, warm_up_batch_size=batch_size)
        return _Verdict(probe, probe.outcome is not Outcome.OOM or answer["was_clean"])

    def _patience(self, batch_size: int, started: float) -> float:
        if self._timeout_seconds is not None:
            return max(0.0, started + self._timeout_seconds - time.monotonic())
        expected = self._slowest_seconds_per_sample * batch_size
        return max(PATIENCE_SECONDS, PATIENCE_FACTOR * expected)

    def _start(self) -> dict[str, Any]:
        spare, self._spare = self._spare, None
        if spare is not None and not spare.is_alive():  # its death says nothing of the target
            spare.kill()
            spare = None
        self._worker = worker = spare or WorkerProcess(self._show_output)
        order = {**self.source.to_order(), "options": self.options.to_dict()}
        worker.send(order, self.source.pickled_setup)
        try:
            answer = worker.receive(self._loading_seconds)
        except WorkerDiedError as end:
            self._end_worker()
            last_words = end.output.rstrip().rpartition("\n")[2]
            raise WorkerError(
                f"the target ended its process while it was loading: {end}"
                + (f"; the last it printed was {last_words!r}" if last_words else "")
            ) from None
        except WorkerHungError:
            self._end_worker()
            raise WorkerError(
                f"the target was still loading after {format_seconds(self._loading_seconds)}; call "
                "its function by yourself to see what it waits for"
            ) from None
        if answer["answer"] != "ready":
            self._end_worker()
            raise _error(answer)
        # Only now: until here both would have fought for the same cores.
        self._spare = WorkerProcess(self._show_output)
        return answer

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _warn(self, warnings: list[str]) -> None:
        self.warnings = tuple(dict.fromkeys((*self.warnings, *warnings)))


@dataclass(frozen=True)
class _Verdict:
    probe: Probe
    is_certain: bool


def _last_verdict(state: RetryCallState) -> _Verdict:
    assert state.outcome is not None
    verdict: _Verdict = state.outcome.result()
    return verdict


def _verdict_of_death(
    death: WorkerDiedError | WorkerGarbledError | WorkerHungError,
    batch_size: int,
    confirm: bool,
    steps: int,
    seconds: float,
) -> _Verdict:
    """What the end of a worker says of the size that it was running."""
    outcome, note = Outcome.FAILED, str(death)
    if isinstance(death, WorkerHungError):
        note = (
            f"hung: stopped after {format_seconds(seconds)} in step {steps + 1}; "
            "--probe-timeout allows for more"
        )
    elif isinstance(death, WorkerDiedError):
        if death.signal_number == signal.SIGKILL:
            outcome = Outcome.OOM
            note = "the process was killed, most likely by the system for want of host memory"
        elif (reason := _printed_reason(death.output)) is not None:
            outcome, note = Outcome.OOM, reason
    probe = Probe(
        batch_size,
        outcome,
        steps=steps + 1,
        seconds=seconds,
        samples=batch_size * (steps + 1),
        confirmed=confirm,
        note=note,
    )
    return _Verdict(probe, is_certain=isinstance(death, WorkerHungError))


def _printed_reason(output: str) -> str | None:
    """Why a process died, if what it printed last says that it ran out of memory."""
    # It needs torch, for which this process has no other use.
    from batchfinder.probing.oom import classify_text
    from batchfinder.probing.oom_table import Tier

    failure = classify_text(output)
    is_memory = failure is not None and failure.tier in (Tier.CERTAIN, Tier.PROBABLE)
    return failure.reason if failure and is_memory else None


def _error(answer: Mapping[str, Any]) -> BatchFinderError:
    """The error that a worker told of, as an exception of ours."""
    if answer["answer"] == "error":
        kind = getattr(errors, str(answer["kind"]), WorkerError)
        error: BatchFinderError = kind(answer["message"])
        return error
    return UserCodeError(answer["message"], answer.get("traceback", ""))
