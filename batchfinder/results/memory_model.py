"""The memory model: how the peak memory of a training step grows with the batch size.

``peak(b) = max over phases of (fixed + per_sample * b)``. The forward/backward pass and the
optimizer step peak at different moments and grow differently, so each phase has a line of its own:
one line through both predicts badly wherever the optimizer step hides the other.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

# A model whose lines miss a reading by more than this share of it is not called linear.
LINEAR_WITHIN = 0.02


class Phase(enum.Enum):
    """The parts of a training step, each with a memory peak of its own.

    The forward pass is part of the next one too, and never needs more. But where the batch is small
    the peak of both may be that of the gradients, which hides what each example adds to the other.
    """

    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIMIZER_STEP = "optimizer_step"


@dataclass(frozen=True)
class PhaseModel:
    """The line of one phase.

    Attributes:
        fixed_bytes: what the phase needs whatever the batch size is.
        per_sample_bytes: what each further example adds; 0 or more.
        worst_residual: the largest miss of a reading, as a fraction of the highest of all phases.
    """

    fixed_bytes: float
    per_sample_bytes: float
    worst_residual: float = 0.0

    def peak_bytes(self, batch_size: int) -> float:
        """The phase's predicted peak at a batch size, in bytes."""
        return self.fixed_bytes + self.per_sample_bytes * batch_size


@dataclass(frozen=True)
class MemoryModel:
    """One line per phase; the peak is the highest of them.

    Attributes:
        phases: the line of each phase that was read.

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
        """What is needed whatever the batch size is, in the phase that limits large batches."""
        return self.growing_phase.fixed_bytes

    @property
    def per_sample_bytes(self) -> float:
        """What each further example adds, in the phase that limits large batches."""
        return self.growing_phase.per_sample_bytes

    @property
    def worst_residual(self) -> float:
        """The largest miss of a reading, as a fraction of the highest of all phases."""
        return max(line.worst_residual for line in self.phases.values())

    @property
    def is_linear(self) -> bool:
        """Whether every reading lies on its line, give or take 2 % of the highest one."""
        return self.worst_residual <= LINEAR_WITHIN

    def peak_bytes(self, batch_size: int) -> float:
        """The predicted peak at a batch size, in bytes."""
        return max(line.peak_bytes(batch_size) for line in self.phases.values())

    def max_batch_size(self, budget_bytes: float) -> int | None:
        """The largest batch size predicted to fit; 0 if none does, None if nothing grows."""
        largest: float = math.inf
        for line in self.phases.values():
            if line.per_sample_bytes > 0:
                largest = min(largest, (budget_bytes - line.fixed_bytes) / line.per_sample_bytes)
            elif line.fixed_bytes > budget_bytes:
                return 0
        return None if math.isinf(largest) else max(0, math.floor(largest))


def fit(readings: Iterable[tuple[int, Mapping[Phase, float]]]) -> MemoryModel | None:
    """Fit one line per phase to the peaks read at several batch sizes.

    Larger batch sizes weigh more (by their size): at small ones the allocator's rounding and the
    model states hide the slope.

    Args:
        readings: pairs of a batch size and the peak in bytes of each phase at that size.

    Returns:
        The model, or None while fewer than two batch sizes were read.
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
    """The weighted least-squares line, never falling; its misses are shares of the highest peak."""
    # In fractions, so that exact readings give the exact line: a slope or a fixed part that is too
    # large by its last bit would turn a maximum of 90 into 89.
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
    if fixed < 0:  # noise, or memory that bends: nothing is held for less than no samples
        fixed = zero
        slope = sum((size**2 * peak for size, peak in points), zero) / sum(
            (size**3 for size, _ in points), zero
        )
    worst = max(abs(fixed + slope * size - peak) for size, peak in points)
    return PhaseModel(float(fixed), float(slope), float(worst) / max(highest, 1))
