"""The memory of a step as a function of batch size and example size. Plain arithmetic.

``peak(n, x) = fixed + n (a x + b x²)``: for each example, attention keeps a term with the square of
its length, or of an image's pixels. Everything else grows with ``x``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Scaling:
    """Lines of memory over batch size at some example sizes, interpolated between those sizes.

    Attributes:
        fixed_bytes: the bytes that do not depend on the batch size, by example size. An example
            size without a reading uses the nearest one.
        per_sample_bytes: the bytes that each example adds, by example size.

    Example:
        >>> scaling = Scaling()
        >>> scaling.learn(1, fixed_bytes=100, per_sample_bytes=12)  # 10 x + 2 x²
        >>> scaling.learn(4, fixed_bytes=100, per_sample_bytes=72)
        >>> scaling.per_sample_at(2), scaling.batch_size_at(2, 1000)
        (28.0, 32.142857142857146)
    """

    fixed_bytes: dict[float, float] = field(default_factory=dict)
    per_sample_bytes: dict[float, float] = field(default_factory=dict)

    def learn(self, x: float, *, fixed_bytes: float, per_sample_bytes: float) -> None:
        """Record the line at an example size."""
        self.fixed_bytes[x] = fixed_bytes
        self.per_sample_bytes[x] = per_sample_bytes

    def learn_reading(self, x: float, batch_size: int, peak_bytes: float) -> None:
        """Record one peak. It gives a slope, since the fixed part hardly depends on the size."""
        slope = (peak_bytes - self.fixed_at(x)) / batch_size
        if slope > 0:
            self.per_sample_bytes[x] = slope

    def rename(self, names: Mapping[float, float]) -> None:
        """Rename the example sizes, once another number turns out to distinguish them."""
        self.fixed_bytes = {names[x]: size for x, size in self.fixed_bytes.items()}
        self.per_sample_bytes = {names[x]: size for x, size in self.per_sample_bytes.items()}

    def fixed_at(self, x: float) -> float:
        """Return the bytes that do not depend on the batch size."""
        return self.fixed_bytes[min(self.fixed_bytes, key=lambda known: abs(known - x))]

    def per_sample_at(self, x: float) -> float:
        """Return the bytes that each example adds. Their ratio to ``x`` is interpolated."""
        ratios = {known: slope / known for known, slope in self.per_sample_bytes.items()}
        # A line through two close readings may be far off elsewhere.
        return x * max(_on_line(ratios, x), min(ratios.values()) / 2)

    def batch_size_at(self, x: float, level_bytes: float) -> float:
        """Return the batch size at which the peak reaches a level."""
        return (level_bytes - self.fixed_at(x)) / self.per_sample_at(x)


def _on_line(points: Mapping[float, float], x: float) -> float:
    """Return the value at ``x`` on the line through the two points around it, or nearest to it."""
    places = sorted(points)
    if x in points or len(places) == 1:
        return points.get(x, points[places[0]])
    after = min(max(bisect_left(places, x), 1), len(places) - 1)
    low, high = places[after - 1], places[after]
    return points[low] + (points[high] - points[low]) * (x - low) / (high - low)
