"""How the memory of a step follows from batch size and example size. Plain arithmetic.

``peak(n, x) = fixed + n (a x + b x²)``: what attention keeps for each example has a term with the
square of its length, or of an image's pixels; all else grows with ``x``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Scaling:
    """Lines of memory over batch size at some example sizes, and what lies between them.

    Attributes:
        fixed_bytes: what a step needs at any batch size, by example size; where it was not read, it
            is taken from the nearest example size.
        per_sample_bytes: what each example adds, by example size.

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
        """Record one peak, which tells the slope, as what is fixed hardly depends on the size."""
        slope = (peak_bytes - self.fixed_at(x)) / batch_size
        if slope > 0:
            self.per_sample_bytes[x] = slope

    def rename(self, names: Mapping[float, float]) -> None:
        """Call the example sizes otherwise: by what turned out to tell them apart."""
        self.fixed_bytes = {names[x]: size for x, size in self.fixed_bytes.items()}
        self.per_sample_bytes = {names[x]: size for x, size in self.per_sample_bytes.items()}

    def fixed_at(self, x: float) -> float:
        """Return what a step needs at any batch size."""
        return self.fixed_bytes[min(self.fixed_bytes, key=lambda known: abs(known - x))]

    def per_sample_at(self, x: float) -> float:
        """Return what each example adds: its ratio to ``x`` is a line between the nearest sizes."""
        ratios = {known: slope / known for known, slope in self.per_sample_bytes.items()}
        # A line through two close readings may lead anywhere.
        return x * max(_on_line(ratios, x), min(ratios.values()) / 2)

    def batch_size_at(self, x: float, level_bytes: float) -> float:
        """Return the batch size with which the peak reaches a level."""
        return (level_bytes - self.fixed_at(x)) / self.per_sample_at(x)


def _on_line(points: Mapping[float, float], x: float) -> float:
    """Return the value at ``x`` of the line through the two nearest points on both sides."""
    places = sorted(points)
    if x in points or len(places) == 1:
        return points.get(x, points[places[0]])
    after = min(max(bisect_left(places, x), 1), len(places) - 1)
    low, high = places[after - 1], places[after]
    return points[low] + (points[high] - points[low]) * (x - low) / (high - low)
