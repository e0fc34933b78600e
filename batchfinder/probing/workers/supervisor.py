"""One worker process after another, from the side of its parent. Imports no torch.

A worker loads the setup itself and answers in JSON lines; nothing is unpickled here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from tenacity import RetryCallState, Retrying, retry_if_result, stop_after_attempt

from batchfinder.errors import (
    WorkerDiedError,
    WorkerError,
    WorkerGarbledError,
    WorkerHungError,
)
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.process import WorkerProcess
from batchfinder.probing.workers.source import SetupSource
from batchfinder.probing.workers.step_times import StepTimes
from batchfinder.probing.workers.supply import WorkerSupply
from batchfinder.probing.workers.verdict import Verdict, error_of, verdict_of_death
from batchfinder.probing.workers.waiting import never
from batchfinder.results.result import Outcome, Probe
from batchfinder.units import format_seconds

# Loading a setup may fetch a large checkpoint from somewhere, but does not take so long.
LOADING_SECONDS = 3600.0


IsDoubtful: TypeAlias = Callable[[Verdict], bool]


class Supervisor:
    """Starts, asks and ends the workers of one search.

    Args:
        source: where a worker gets the setup from.
        options: of the search.
        probe_timeout_seconds: after which a probe is taken for hung; None: by the steps seen.
        loading_timeout_seconds: after which loading the setup is taken for hung.
        show_output: whether what the user's code prints is passed on to standard error.
        step_times: how long steps take.

    Attributes:
        options: as given, and what later workers need to know of earlier ones.
        warnings: what the user should know.
    """

    def __init__(
        self,
        source: SetupSource,
        options: ProbeOptions,
        *,
        probe_timeout_seconds: float | None = None,
        loading_timeout_seconds: float = LOADING_SECONDS,
        show_output: bool = False,
        step_times: StepTimes | None = None,
    ) -> None:
        self.source = source
        self.options = options
        self.warnings: tuple[str, ...] = ()
        self._timeout_seconds = probe_timeout_seconds
        self._loading_seconds = loading_timeout_seconds
        self._supply = WorkerSupply(options.device, show_output, source.own_setup)
        self._step_times = step_times or StepTimes()
        self._is_new = True
        self._worker: WorkerProcess | None = None

    @property
    def has_worker(self) -> bool:
        """Whether a worker waits for a probe."""
        return self._worker is not None

    def start(
        self, group: Mapping[str, Any] | None = None, is_given_up: Callable[[], bool] = never
    ) -> dict[str, Any]:
        """Start a worker and have it load the setup.

        Args:
            group: the process group that it has to join, as plain data; None: none.
            is_given_up: asked while waiting; the worker is ended once it says so.

        Returns:
            What the worker tells of device and setup.

        Raises:
            BatchFinderError: what the worker raised on loading the setup.
            UserCodeError: the user's code raised on loading.
            WorkerError: the worker died on loading, or did not come to an end.
            WorkerReleasedError: it was given up.
        """
        order = {**self.source.to_order(), "options": self.options.to_dict(), "group": group}
        self._is_new = True
        try:
            worker = self._worker = self._supply.take(self._loading_seconds, is_given_up)
            worker.send(order, self.source.pickled_setup)
            answer = worker.receive(self._loading_seconds, is_given_up)
        except WorkerDiedError as end:
            self.end_worker()
            last_words = end.output.rstrip().rpartition("\n")[2]
            raise WorkerError(
                f"the target ended its process while it was loading: {end}"
                + (f"; the last it printed was {last_words!r}" if last_words else "")
            ) from None
        except WorkerHungError:
            self.end_worker()
            raise WorkerError(
                f"the target was still loading after {format_seconds(self._loading_seconds)}; call "
                "its function by yourself to see what it waits for"
            ) from None
        except WorkerError:
            self.end_worker()
            raise
        if answer["answer"] != "ready":
            self.end_worker()
            raise error_of(answer)
        if answer["limit_warning"]:
            self.warn([answer["limit_warning"]])
        # Later workers get the same budget, whatever other processes have taken meanwhile.
        self.options = replace(self.options, budget_bytes=answer["budget_bytes"])
        # Only now: until here both would have fought for the same cores.
        self._supply.prepare(answer["device"])
        return answer

    def attempt(
        self, batch_size: int, confirm: bool, is_given_up: Callable[[], bool] = never
    ) -> Verdict:
        """Have the worker run one batch size.

        Raises:
            BatchFinderError: what the worker raised.
            UserCodeError: the user's code raised.
            WorkerReleasedError: it was given up.
        """
        worker = self._worker
        assert worker is not None
        started = time.monotonic()
        worker.send({"batch_size": batch_size, "confirm": confirm})
        steps = 0
        try:
            while True:
                patience = self._patience(batch_size, started)
                answer = worker.receive(patience, is_given_up)
                if self._is_new:
                    self._is_new = False
                    self._step_times.note_start(time.monotonic() - started)
                if answer["answer"] != "step":
                    break
                steps += 1
                if answer["compiles"]:
                    self._step_times.note_compiling()
        except (WorkerDiedError, WorkerGarbledError, WorkerHungError) as end:
            self.end_worker()
            seconds = time.monotonic() - started
            return verdict_of_death(end, batch_size, confirm, steps, seconds)
        except WorkerError:
            self.end_worker()
            raise
        if answer["answer"] != "probe":
            self.end_worker()
            raise error_of(answer)
        self.warn(answer["warnings"])
        probe = Probe.from_dict(answer["probe"])
        if probe.step_seconds:
            self._step_times.note(batch_size, probe.step_seconds)
        is_certain = probe.outcome is not Outcome.OOM or answer["was_clean"]
        return Verdict(probe, is_certain, answer["is_reusable"])

    def take_note(self, verdict: Verdict) -> None:
        """Draw the consequences of a verdict: for the worker, and for the warm-up of later ones."""
        if not verdict.is_reusable:
            self.end_worker()
        if verdict.probe.fits and self.options.warm_up_batch_size is None:
            self.options = replace(self.options, warm_up_batch_size=verdict.probe.batch_size)

    def ask_twice(self, attempt: Callable[[], Verdict], is_doubtful: IsDoubtful) -> Probe:
        """Make an attempt, and another one in a fresh worker if the first says too little.

        Args:
            attempt: tries the size.
            is_doubtful: whether a verdict asks for a second attempt.

        Returns:
            The probe of the last attempt.
        """
        retrying = Retrying(
            retry=retry_if_result(is_doubtful),
            stop=stop_after_attempt(2),
            sleep=lambda _: self.end_worker(),
            retry_error_callback=_last_verdict,
        )
        verdict: Verdict = retrying(attempt)
        return verdict.probe

    def warn(self, warnings: Iterable[str]) -> None:
        """Add warnings, each once."""
        self.warnings = tuple(dict.fromkeys((*self.warnings, *warnings)))

    def end_worker(self) -> None:
        """End the worker there is. Safe to call twice."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def close(self) -> None:
        """End every process. Safe to call twice."""
        self.end_worker()
        self._supply.close()

    def _patience(self, batch_size: int, started: float) -> float:
        if self._timeout_seconds is not None:
            return max(0.0, started + self._timeout_seconds - time.monotonic())
        return self._step_times.patience_seconds(batch_size, self._is_new)


def _last_verdict(state: RetryCallState) -> Verdict:
    """What is left where a second attempt was no better: its verdict."""
    assert state.outcome is not None
    verdict: Verdict = state.outcome.result()
    return verdict
