"""When a step counts as hung, and what a size is worth whose process hung or died. No torch."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from batchfinder.errors import WorkerDiedError, WorkerError, WorkerHungError
from batchfinder.probing.attempt import Attempt
from batchfinder.results.probe import Outcome, Probe
from batchfinder.units import format_seconds


@dataclass
class StepTimes:
    """The durations of steps, and the time after which a step counts as hung.

    The limit is ``factor`` times the duration expected at the size, plus ``margin_seconds``. The
    expected duration is that of the slowest step so far, scaled to the size.

    Attributes:
        unknown_seconds: the limit for the first step of all, which may compile kernels.
        factor: multiple of the expected duration.
        margin_seconds: time added to that multiple.
        least_seconds: the lowest limit.
    """

    unknown_seconds: float = 600.0
    factor: float = 20.0
    margin_seconds: float = 0.0
    least_seconds: float = 600.0
    _largest: int = 0
    _slowest_seconds: float = 0.0
    _slowest_start_seconds: float = 0.0

    def note(self, batch_size: int, step_seconds: float) -> None:
        """Record the duration of a step."""
        self._largest = max(self._largest, batch_size)
        self._slowest_seconds = max(self._slowest_seconds, step_seconds)

    def note_start(self, seconds: float) -> None:
        """Record the duration of a worker's first step."""
        self._slowest_start_seconds = max(self._slowest_start_seconds, seconds)

    def note_compiling(self) -> None:
        """Record that some later step may compile again, for another size."""
        self.margin_seconds = max(self.margin_seconds, self.unknown_seconds)

    def patience_seconds(self, batch_size: int, is_first_step: bool) -> float:
        """Return the time to wait for a worker's step before it counts as hung."""
        if not self._largest:
            return self.unknown_seconds
        expected = self._slowest_seconds * max(1.0, batch_size / self._largest)
        if is_first_step:
            expected = max(expected, self._slowest_start_seconds)
        return max(self.least_seconds, self.factor * expected + self.margin_seconds)


def attempt_of(
    end: WorkerError, batch_size: int, confirm: bool, steps: int, seconds: float
) -> Attempt:
    """Return the record of an attempt whose process hung, died or sent garbage, after some steps.

    Only a hung step is believed at once: a process may die for other reasons than the size.
    """
    outcome, note = Outcome.FAILED, str(end)
    is_hung = isinstance(end, WorkerHungError)
    if is_hung:
        note = (
            f"hung: stopped after {format_seconds(seconds)} in step {steps + 1}; "
            "batchfinder find --probe-timeout allows for more"
        )
    elif isinstance(end, WorkerDiedError):
        from batchfinder.probing.devices.oom import classify_text  # late: it imports torch

        failure = classify_text(end.output)
        if end.signal_number == getattr(signal, "SIGKILL", 9):  # Windows has none
            outcome = Outcome.OOM
            note = "the process was killed, most likely by the system for lack of host memory"
        elif failure is not None and failure.is_memory:
            outcome, note = Outcome.OOM, failure.reason
    steps += 1
    samples = batch_size * steps
    probe = Probe(batch_size, outcome, steps, seconds, samples, confirmed=confirm, note=note)
    return Attempt(probe, is_believed=is_hung, is_reusable=False)
