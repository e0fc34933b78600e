"""What a search tells: each probe, and the result as a whole. Frozen; rendered elsewhere."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchfinder.results.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.results.memory_model import MemoryModel, Phase
from batchfinder.units import format_seconds

SCHEMA_VERSION = 1

THRASHING_NOTE = "runs only by flushing the allocator's cache in every step"

# The warning of a search of which no step gives back what it has taken.
LEAK_WARNING = (
    "each step leaves memory behind that no later one gives back: unless that ends, as a history "
    "of fixed length does, training runs out of it at any batch size; detach() or drop what is "
    "kept from step to step, such as outputs in a list"
)


class Outcome(enum.Enum):
    """How a probe ended."""

    FITS = "fits"
    OOM = "oom"
    FAILED = "failed"
    """It did not run at this size, and not for want of memory: a crash, a hang."""


class Status(enum.Enum):
    """How a search ended."""

    FOUND = "found"
    """The largest size that fits, proved by a failure just above it."""
    CAPPED = "capped"
    """The maximum asked for fits; nothing larger was tried."""
    NOTHING_FITS = "nothing_fits"
    """Not even the smallest size fits; the batch size is 0."""
    INTERRUPTED = "interrupted"
    """Stopped from outside; the batch size is the largest that had run, 0 if none had."""
    FAILED = "failed"
    """Stopped by an error; the batch size is the largest that had run, 0 if none had."""


@dataclass(frozen=True)
class Probe:
    """One batch size tried once.

    Attributes:
        batch_size: examples per forward/backward pass.
        outcome: how it ended.
        steps: training steps begun at this size, a failing one counted.
        samples: examples run through the model, warm-up steps at a smaller size included.
        seconds: what the whole probe took.
        step_seconds: what its last complete step took; None if none was completed.
        peak_allocated_bytes: most bytes held by tensors at any moment; None if it was not read.
        peak_reserved_bytes: most bytes held by the caching allocator; None if it was not read.
        phase_peak_bytes: the peak of each phase, held by tensors. (Of an estimate, that of
            ``forward_backward`` is what the allocator holds.)
        allocation_retries: how often the allocator had to flush its cache in the last step, if that
            was completed.
        confirmed: whether this was a confirmation: several full steps from a fresh allocator.
        note: what there is to say: the reason of a failure, a warning.
        rank_peak_bytes: the peak of each rank, by rank; None where it was not read. Empty where
            one process trains alone.
        limiting_rank: the rank that failed first, or that has the least room left; its readings
            are those of the probe. None where one process trains alone.
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

    @property
    def fits(self) -> bool:
        """Whether the outcome is FITS."""
        return self.outcome is Outcome.FITS

    @property
    def is_thrashing(self) -> bool:
        """Whether it ran, but only by flushing the allocator's cache in every step."""
        return self.outcome is Outcome.OOM and self.allocation_retries > 0

    def to_dict(self) -> dict[str, Any]:
        """The probe as plain data, ready for JSON."""
        return {
            "batch_size": self.batch_size,
            "outcome": self.outcome.value,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "phase_peak_bytes": {
                phase.value: peak for phase, peak in self.phase_peak_bytes.items()
            },
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "steps": self.steps,
            "samples": self.samples,
            "allocation_retries": self.allocation_retries,
            "confirmed": self.confirmed,
            "note": self.note,
            "rank_peak_bytes": [*self.rank_peak_bytes],
            "limiting_rank": self.limiting_rank,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Probe:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError, ValueError, TypeError: the data is not that of a probe.
        """
        peaks = {Phase(name): int(peak) for name, peak in data["phase_peak_bytes"].items()}
        return cls(
            **{
                **data,
                "outcome": Outcome(data["outcome"]),
                "phase_peak_bytes": peaks,
                "rank_peak_bytes": tuple(data["rank_peak_bytes"]),
            }
        )


_NO_PROBE = Probe(0, Outcome.FAILED, steps=0, seconds=0.0)


@dataclass(frozen=True)
class NextFailure:
    """The smallest batch size above the answer that was tried, and why it did not run.

    Attributes:
        batch_size: examples per forward/backward pass.
        outcome: OOM or FAILED.
        reason: one line.
    """

    batch_size: int
    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class BatchSizeResult:
    """The answer of a search, with the evidence for it.

    ``int(result)`` is the batch size, ``str(result)`` one line with it.

    Attributes:
        batch_size: examples per device per forward/backward pass; 0 if nothing fits.
        status: how the search ended.
        device: the device's name, such as ``"cuda:0 NVIDIA H200"``.
        budget_bytes: what the search was allowed to use.
        probes: every probe, in the order they were run.
        memory_model: the lines fitted to the probes; None while fewer than two sizes fitted.
        next_failure: the smallest size above the answer that failed; None if none was tried.
        confirmed_steps: full steps run at the answer, from a fresh allocator; 0 if it was not
            confirmed.
        cost_full_size_steps: what the search cost in steps at the answer's size: the examples of
            all probes, a failing step counted as a whole one, by the answer. 0 if nothing fits.
        seconds: what the whole search took.
        versions: of python, torch, batchfinder and, where there is one, CUDA or HIP.
        warnings: what the user should know, each one line with what to do about it.
        estimated_batch_size: what the search started from; None if it started without an estimate.
        seconds_by_part: where the time went: ``loading`` (importing PyTorch and the target),
            ``estimate`` (waiting for one), ``steps`` (the probes), ``restoring`` (the training
            state), ``rest``. Empty where it was not measured.
    """

    batch_size: int
    status: Status
    device: str
    budget_bytes: int
    probes: tuple[Probe, ...]
    memory_model: MemoryModel | None
    next_failure: NextFailure | None
    confirmed_steps: int
    cost_full_size_steps: float
    seconds: float
    versions: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    estimated_batch_size: int | None = None
    seconds_by_part: Mapping[str, float] = field(default_factory=dict)

    def __int__(self) -> int:
        return self.batch_size

    def __str__(self) -> str:
        answer = f"batch size {self.batch_size} ({self.status.value})"
        return f"{answer} on {self.device} in {format_seconds(self.seconds)}"

    @property
    def world_size(self) -> int:
        """How many ranks train together; 1 where one process trains alone."""
        return max((len(probe.rank_peak_bytes) for probe in self.probes), default=0) or 1

    @property
    def rank_peak_bytes(self) -> tuple[int | None, ...]:
        """The peak of each rank at the answer, by rank; empty where one process trains alone."""
        ran = [p for p in self.probes if p.fits and p.batch_size == self.batch_size]
        return max(ran, key=lambda p: p.confirmed, default=_NO_PROBE).rank_peak_bytes

    @property
    def limiting_rank(self) -> int | None:
        """The rank that stands in the way of more; None where one process trains alone.

        It is the one that failed above the answer, or that has the least room left at it.
        """
        size = self.next_failure.batch_size if self.next_failure else self.batch_size
        tried = (p.limiting_rank for p in self.probes if p.batch_size == size)
        return next((rank for rank in tried if rank is not None), None)

    def accumulation_plan(
        self, global_batch_size: int, world_size: int | None = None
    ) -> AccumulationPlan:
        """How to reach a global batch size with micro-batches no larger than the answer.

        With more than one accumulation step the gradients of one micro-batch are alive in the
        forward pass of the next: find the answer with ``accumulate=True`` then.

        Args:
            global_batch_size: examples per optimizer step over all ranks.
            world_size: data-parallel ranks. Default: those that the answer was found with.

        Returns:
            The exact split if there is one, else the nearest ones below and above.

        Raises:
            UsageError: a size is not positive, or nothing fits.
        """
        return plan_accumulation(
            global_batch_size,
            self.batch_size,
            self.world_size if world_size is None else world_size,
        )

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data: raw bytes and seconds, with a ``schema_version``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "batch_size": self.batch_size,
            "status": self.status.value,
            "device": self.device,
            "budget_bytes": self.budget_bytes,
            "world_size": self.world_size,
            "rank_peak_bytes": [*self.rank_peak_bytes],
            "limiting_rank": self.limiting_rank,
            "memory_model": _model_to_dict(self.memory_model),
            "probes": [probe.to_dict() for probe in self.probes],
            "next_failure": None
            if self.next_failure is None
            else {
                "batch_size": self.next_failure.batch_size,
                "outcome": self.next_failure.outcome.value,
                "reason": self.next_failure.reason,
            },
            "confirmed_steps": self.confirmed_steps,
            "cost_full_size_steps": self.cost_full_size_steps,
            "seconds": self.seconds,
            "versions": dict(self.versions),
            "warnings": list(self.warnings),
            "estimated_batch_size": self.estimated_batch_size,
            "seconds_by_part": dict(self.seconds_by_part),
        }

    def to_json(self) -> str:
        """The result as one JSON object, the same that ``batchfinder find --json`` prints."""
        return json.dumps(self.to_dict(), allow_nan=False)


def _model_to_dict(model: MemoryModel | None) -> dict[str, Any] | None:
    if model is None:
        return None
    return {
        "fixed_bytes": round(model.fixed_bytes),
        "per_sample_bytes": round(model.per_sample_bytes, 1),
        "is_linear": model.is_linear,
        "worst_residual": round(model.worst_residual, 6),
        "phases": {
            phase.value: {
                "fixed_bytes": round(line.fixed_bytes),
                "per_sample_bytes": round(line.per_sample_bytes, 1),
            }
            for phase, line in model.phases.items()
        },
    }
