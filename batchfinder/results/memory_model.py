"""The memory model: how the peak memory of a training step grows with the batch size.

``peak(b) = max over phases of (fixed + per_sample * b)``. The forward/backward pass and the
optimizer step peak at different moments and grow differently, so each phase has its own line. A
single line would predict badly at batch sizes where the optimizer step hides the other phases.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from batchfinder.results.record import Record

# The largest residual of a model that still counts as linear, as a fraction of the highest peak.
LINEAR_WITHIN = 0.02


class Phase(enum.Enum):
    """The parts of a training step, each with its own memory peak.

    FORWARD is contained in FORWARD_BACKWARD and never needs more. It is measured apart because at
    small batch sizes the gradients may set the peak of the whole and hide the cost per example.
    VALIDATION follows the step if a validation was requested. Its batches have their own size.
    """

    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIMIZER_STEP = "optimizer_step"
    VALIDATION = "validation"


@dataclass(frozen=True)
class PhaseModel:
    """The line of one phase.

    Attributes:
        fixed_bytes: memory the phase needs at any batch size.
        per_sample_bytes: memory that each example adds; 0 or more.
        worst_residual: the largest residual, as a fraction of the highest peak of all phases.
    """

    fixed_bytes: float
    per_sample_bytes: float
    worst_residual: float = 0.0

    def peak_bytes(self, batch_size: int) -> float:
        """Predict the phase's peak at a batch size, in bytes."""
        return self.fixed_bytes + self.per_sample_bytes * batch_size


@dataclass(frozen=True)
class MemoryModel(Record):
    """One line per phase; the peak is the highest of them.

    Example:
        >>> model = fit([(1, {Phase.FORWARD_BACKWARD: 110}), (5, {Phase.FORWARD_BACKWARD: 150})])
        >>> model.fixed_bytes, model.per_sample_bytes, model.peak_bytes(20)
        (100.0, 10.0, 300.0)
        >>> model.max_batch_size(budget_bytes=1000)
        90
    """

    phases: Mapping[Phase, PhaseModel]

    @property
    def growing_phase(self) -> PhaseModel:
        """The phase that limits large batches: the one with the steepest line."""
        return max(self.phases.values(), key=lambda line: line.per_sample_bytes)

    @property
    def fixed_bytes(self) -> float:
        """Memory needed at any batch size, in the phase that limits large batches."""
        return self.growing_phase.fixed_bytes

    @property
    def per_sample_bytes(self) -> float:
        """Memory that each example adds, in the phase that limits large batches."""
        return self.growing_phase.per_sample_bytes

    @property
    def worst_residual(self) -> float:
        """The largest residual, as a fraction of the highest peak of all phases."""
        return max(line.worst_residual for line in self.phases.values())

    @property
    def is_linear(self) -> bool:
        """True if every reading is within 2 % of its line (2 % of the highest peak)."""
        return self.worst_residual <= LINEAR_WITHIN

    def peak_bytes(self, batch_size: int) -> float:
        """Predict the peak at a batch size, in bytes."""
        return max(line.peak_bytes(batch_size) for line in self.phases.values())

    def max_batch_size(self, budget_bytes: float) -> int | None:
        """Predict the largest batch size that fits; 0 if none does, None if nothing grows."""
        largest: float = math.inf
        for line in self.phases.values():
            if line.per_sample_bytes > 0:
                largest = min(largest, (budget_bytes - line.fixed_bytes) / line.per_sample_bytes)
            elif line.fixed_bytes > budget_bytes:
                return 0
        return None if math.isinf(largest) else max(0, math.floor(largest))

    def to_dict(self) -> dict[str, Any]:
        """Return the model as plain data, ready for JSON."""
        return {
            **_rounded(self),
            "is_linear": self.is_linear,
            "worst_residual": round(self.worst_residual, 6),
            "phases": {phase.value: _rounded(line) for phase, line in self.phases.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryModel:
        """Rebuild a model from :meth:`to_dict`; all its lines have the worst residual."""
        worst = float(data["worst_residual"])
        return cls(
            {
                Phase(name): PhaseModel(line["fixed_bytes"], line["per_sample_bytes"], worst)
                for name, line in data["phases"].items()
            }
        )


def _rounded(line: PhaseModel | MemoryModel) -> dict[str, float]:
    return {
        "fixed_bytes": round(line.fixed_bytes),
        "per_sample_bytes": round(line.per_sample_bytes, 1),
    }


def fit(readings: Iterable[tuple[int, Mapping[Phase, float]]]) -> MemoryModel | None:
    """Fit one line per phase to the peaks read at several batch sizes; None for fewer than two.

    Readings are weighted by their batch size: at small sizes, the allocator's rounding and the
    model states hide the slope.
    """
    points: dict[Phase, dict[int, float]] = {}
    for batch_size, peaks in readings:
        for phase, peak in peaks.items():
            at_size = points.setdefault(phase, {})
            at_size[batch_size] = max(peak, at_size.get(batch_size, 0))
    highest = max((peak for at_size in points.values() for peak in at_size.values()), default=0)
    lines = {
        phase: _line(at_size, highest) for phase, at_size in points.items() if len(at_size) > 1
    }
    return MemoryModel(lines) if lines else None


def _line(readings: Mapping[int, float], highest: float) -> PhaseModel:
    """Fit a weighted least-squares line that never falls."""
    # Fractions let exact readings give the exact line. With floats, a slope that is too large by
    # its last bit would turn a maximum of 90 into 89.
    points = [(Fraction(size), Fraction(peak)) for size, peak in readings.items()]
    zero = Fraction(0)
    total = sum((size for size, _ in points), zero)
    mean_size = sum((size * size for size, _ in points), zero) / total
    mean_peak = sum((size * peak for size, peak in points), zero) / total
    spread = sum((size * (size - mean_size) ** 2 for size, _ in points), zero)
    covariance = sum(
        (size * (size - mean_size) * (peak - mean_peak) for size, peak in points), zero
    )
    slope = max(zero, covariance / spread)
    fixed = mean_peak - slope * mean_size
    if fixed < 0:
        # Noisy or nonlinear readings: an empty batch cannot use negative memory. The line starts
        # at the smallest reading, or at the origin if that is still too steep.
        for size, peak in (min(points), (zero, zero)):
            slope = sum((n * (n - size) * (y - peak) for n, y in points), zero) / sum(
                (n * (n - size) ** 2 for n, _ in points), zero
            )
            fixed = peak - slope * size
            if fixed >= 0:
                break
    worst = max(abs(fixed + slope * size - peak) for size, peak in points)
    return PhaseModel(float(fixed), float(slope), float(worst) / max(highest, 1))
