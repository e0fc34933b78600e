"""One batch size, tried once."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from batchfinder.results.memory_model import Phase
from batchfinder.results.record import Record
from batchfinder.units import format_bytes, format_seconds

VARIED_NOTE = "it fits, but leaves too little room for other orders of batches that differ in shape"
SHORT_LIVED_NOTE = (
    "its steps fit, but run out of memory, or go on to flush the allocator's cache, when replayed "
    "for longer"
)
FORESEEN_NOTE = (
    "the steps just below it, scaled to this size, run out of memory, or go on to flush the "
    "allocator's cache, when replayed, so it did not run itself"
)
THRASHING_NOTE = "runs only by flushing the allocator's cache after its first steps"

IN_VALIDATION = "in the validation: "
"""The beginning of a note about a failure in the validation that follows each step."""

LEAK_WARNING = (
    "memory grows with every step and is never released, so training will run out of it at any "
    "batch size unless that growth ends. Try detach().cpu() on what you keep from step to step"
)


def without_place(reason: str) -> tuple[str, bool]:
    """Return why a size failed, and True if it was in the validation, which the reason names.

    Example:
        >>> without_place("in the validation: out of memory")
        ('out of memory', True)
    """
    return reason.removeprefix(IN_VALIDATION), reason.startswith(IN_VALIDATION)


class Outcome(enum.Enum):
    """The ways in which a probe may end."""

    FITS = "fits"
    OOM = "oom"
    FAILED = "failed"
    """The probe failed for a reason other than memory, such as a crash or a hang."""


@dataclass(frozen=True)
class Probe(Record):
    """One batch size, tried once.

    Attributes:
        batch_size: examples per forward/backward pass.
        outcome: how the probe ended.
        steps: training steps started at this size, including a failing one; 0 if a replay showed
            that it fails.
        samples: examples run through the model, including warm-up steps at a smaller size.
        seconds: duration of the whole probe.
        step_seconds: duration of the last complete step, or in ``run`` of the median one; None if
            none was completed.
        steps_seconds: duration of each complete step at this size.
        peak_allocated_bytes: most bytes that tensors held at any moment; None if not read.
        peak_reserved_bytes: most bytes that the caching allocator held; None if not read.
        outside_bytes: bytes of the GPU in use outside the caching allocator after the last step:
            the CUDA context, kernels and libraries, and other processes; None if not read.
        phase_peak_bytes: most bytes that tensors held in each phase. In an estimate,
            ``forward_backward`` is the allocator's peak instead.
        allocation_retries: times the allocator flushed its cache in the last complete step.
        confirmed: True for a confirmation: several full steps from a fresh allocator.
        note: the reason for a failure, or a remark.
        most_examples: the most examples that a step can have, if there are fewer than
            ``batch_size``; else None.
        steps_differ: True if its steps were seen to make different requests of a caching allocator,
            because batches vary in length, or layers are skipped at random.
        rank_peak_bytes: the peak of each rank, by rank; None where it was not read. Empty if one
            process trains alone.
        limiting_rank: the rank that failed first or has the least room left. The probe's readings
            are those of this rank. None if one process trains alone.
    """

    batch_size: int
    outcome: Outcome
    steps: int
    seconds: float
    samples: int = 0
    step_seconds: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    phase_peak_bytes: Mapping[Phase, int] = field(default_factory=dict)
    allocation_retries: int = 0
    confirmed: bool = False
    note: str = ""
    rank_peak_bytes: tuple[int | None, ...] = ()
    limiting_rank: int | None = None
    steps_seconds: tuple[float, ...] = ()
    outside_bytes: int | None = None
    most_examples: int | None = None
    steps_differ: bool = False

    def __str__(self) -> str:
        verdict = f"{self.outcome.value}, {self.note}" if self.note else self.outcome.value
        peak = f", peak {format_bytes(self.peak_bytes)}" if self.peak_bytes else ""
        time = f" in {format_seconds(self.seconds)}" if self.seconds else ""
        return f"batch size {self.batch_size}: {verdict}{peak}{time}"

    @property
    def fits(self) -> bool:
        """True if the outcome is FITS."""
        return self.outcome is Outcome.FITS

    @property
    def is_thrashing(self) -> bool:
        """True if the size runs only by flushing the allocator's cache after its first steps."""
        return self.outcome is Outcome.OOM and self.allocation_retries > 0

    @property
    def peak_bytes(self) -> int | None:
        """The peak that counts against the budget, or the best available reading."""
        if self.phase_peak_bytes:
            return max(self.phase_peak_bytes.values())
        return self.peak_reserved_bytes or self.peak_allocated_bytes

    @property
    def batch_seconds(self) -> tuple[float, ...]:
        """Seconds for one batch, as each step took them: with gradient accumulation it runs two.

        The first of several steps is left out, because it chooses kernels and allocates memory.
        """
        batches = max(1, round((self.samples or 1) / (max(1, self.steps) * self.batch_size)))
        seconds = tuple(second / batches for second in self.steps_seconds)
        return seconds[1:] or seconds

    @property
    def tensor_bytes(self) -> int:
        """The most bytes that tensors held at any moment; 0 if not read."""
        return self.peak_allocated_bytes or max(self.phase_peak_bytes.values(), default=0)


def peak_at(probes: Iterable[Probe], batch_size: int) -> int | None:
    """Return the highest peak of the probes that fit at a size; None if none was read."""
    peaks = (probe.peak_bytes for probe in probes if probe.fits and probe.batch_size == batch_size)
    return max(filter(None, peaks), default=None)
