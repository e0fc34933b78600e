"""The speed of training at several batch sizes, and the smallest one that is as fast as any.

Pure functions of the durations of steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchfinder.results.record import Record

# A size within this fraction of the best rate counts as just as fast.
AS_FAST = 0.02

# The median of readings varies this many times as much as their mean, if they are normal. Their
# standard deviation is as many times their mean deviation.
MEDIAN_ERROR = 1.2533

# A difference counts from this many standard errors on; of few readings, these are less known.
CERTAIN = 2

# The time of a step combines a floor and a line in the batch size n: t^p = floor^p + (slope n)^p.
# Power 1 is their sum. Large powers are their maximum, as on a GPU that small batches do not fill.
POWERS = (1, 2, 4, 8)

# By chance, the mean square of the distances from the right curve is seldom larger than this many
# times that of the errors.
LUCK = 3

# A shorter step is below what clocks can measure, in seconds.
LEAST = 1e-9

# Passes over the readings that tell the sizes' times from the pace of the rounds.
PASSES = 5


@dataclass(frozen=True)
class Rate(Record):
    """The speed of training at one batch size.

    Attributes:
        batch_size: examples per device per forward/backward pass.
        samples_per_second: examples per second and device, by the median of the steps.
        spread: the standard deviation of the steps around the pace of their round, as a fraction.
        rounds: the number of rounds that timed it.
    """

    batch_size: int
    samples_per_second: float
    spread: float
    rounds: int

    @property
    def error(self) -> float:
        """The standard error of the rate, as a fraction."""
        return MEDIAN_ERROR * self.spread / math.sqrt(self.rounds)


@dataclass(frozen=True)
class Throughput(Record):
    """The speed of training at several batch sizes.

    Attributes:
        rates: the rate at each batch size, the smallest first.
        knee: the smallest of these sizes whose rate is within 2 % of the best.
        knee_from: the smallest of these sizes that the knee may be, as steps vary.
        knee_to: the largest of these sizes that the knee may be.
        is_clear: True if these two are at most one size away from the knee, and not all sizes are
            between them.
    """

    rates: tuple[Rate, ...]
    knee: int
    knee_from: int
    knee_to: int
    is_clear: bool

    def rate_at(self, batch_size: int) -> float | None:
        """Return the samples per second at a size, measured or interpolated; None outside."""
        seconds = [(one.batch_size, one.batch_size / one.samples_per_second) for one in self.rates]
        if not seconds[0][0] <= batch_size <= seconds[-1][0]:
            return None
        return batch_size / interpolated(seconds, batch_size)


def interpolated(points: Sequence[tuple[int, float]], at: int) -> float:
    """Return the value at a place, interpolated between the points around it; else the nearest's.

    Example:
        >>> interpolated([(2, 1.0), (4, 1.5), (8, 2.5)], 6)
        2.0
    """
    low, low_value = max((point for point in points if point[0] <= at), default=points[0])
    high, high_value = min((point for point in points if point[0] >= at), default=points[-1])
    share = min(max((at - low) / (high - low), 0.0), 1.0) if high > low else 0.0
    return low_value + share * (high_value - low_value)


def throughput_of(rounds: Sequence[Mapping[int, Sequence[float]]]) -> Throughput:
    """Return the rates and the knee.

    A busy machine is faster and slower for seconds at a time. So each round times the sizes one
    after the other, and only the differences within a round tell which size is faster.

    Args:
        rounds: the duration of each step, by batch size, in each round: at least one. A round may
            lack some sizes.

    Example:
        >>> throughput_of([{n: [0.1 + n / 100] for n in (100, 200, 400, 800)}] * 4).knee
        400
    """
    seconds, spread, drift, freedom = _steps(rounds)
    rates = [
        Rate(size, size / of_size, spread, sum(size in one for one in rounds))
        for size, of_size in sorted(seconds.items())
    ]
    # A size that some rounds lack is compared with what was timed earlier or later.
    drifts = [drift if rate.rounds < len(rounds) else 0.0 for rate in rates]
    errors = [math.hypot(rate.error, of_size) for rate, of_size in zip(rates, drifts, strict=True)]
    smooth, errors = _smoothed(rates, errors)
    low, knee, high = 0, _as_fast(smooth, errors, 0)[0], len(rates) - 1
    if freedom:
        certain = CERTAIN * (1 + 2 / freedom)
        low = _as_fast(smooth, errors, certain)[0]
        surely = _as_fast(smooth, errors, -certain)
        high = surely[0] if surely else _as_fast(smooth, errors, certain, share=0)[-1]
    is_clear = max(knee - low, high - knee) <= 1 and (high - low < len(rates) - 1 or high == 0)
    at_knee, at_low, at_high = (rates[at].batch_size for at in (knee, low, high))
    return Throughput(tuple(rates), at_knee, at_low, at_high, is_clear)


def _steps(
    rounds: Sequence[Mapping[int, Sequence[float]]],
) -> tuple[dict[int, float], float, float, int]:
    """Return the time of a step at each size, and how much steps, and rounds, vary, as fractions.

    The last number is by how many the readings are more than those that explain them.

    The logarithm of a time is the sum of that of its size and that of the pace of its round. Each
    is the median of what the other leaves, so a single delayed step does not count.
    """
    logs = [
        {n: [math.log(max(one, LEAST)) for one in of_size] for n, of_size in by_size.items()}
        for by_size in rounds
    ]
    sizes = {n for by_size in logs for n in by_size}
    middles = [{n: statistics.median(of_size) for n, of_size in one.items()} for one in logs]
    paces = [0.0] * len(rounds)
    levels: dict[int, float] = {}
    for _ in range(PASSES):
        for n in sizes:
            of_size = (one[n] - pace for one, pace in zip(middles, paces, strict=True) if n in one)
            levels[n] = statistics.median(of_size)
        paces = [statistics.median(one[n] - levels[n] for n in one) for one in middles]
    usual = statistics.median(paces)
    off = [
        abs(one - levels[n] - pace)
        for by_size, pace in zip(logs, paces, strict=True)
        for n, of_size in by_size.items()
        for one in of_size
    ]
    freedom = max(0, len(off) - len(sizes) - len(rounds) + 1)
    spread = MEDIAN_ERROR * sum(off) / freedom if freedom else 0.0
    drift = max(paces) - min(paces)
    return {n: math.exp(level + usual) for n, level in levels.items()}, spread, drift, freedom


def _smoothed(rates: Sequence[Rate], errors: list[float]) -> tuple[list[float], list[float]]:
    """Return the rates and their errors, or those on a curve through them if one is near."""
    measured = [rate.samples_per_second for rate in rates]
    if len(rates) < 4:
        return measured, errors
    curve = min((_fit(rates, power) for power in POWERS), key=lambda fit: _square(measured, fit))
    chance = statistics.mean(error**2 for error in errors)
    square = _square(measured, curve)
    if square > LUCK * chance:
        return measured, errors
    # Two numbers make the curve, and it misses the rates by more than chance if it is a wrong one.
    error = math.sqrt(2 / len(rates) * chance + max(0.0, square - chance))
    return curve, [error] * len(rates)


def _fit(rates: Sequence[Rate], power: int) -> list[float]:
    """Return the rates on the nearest curve with this power, by relative least squares."""
    # In x = n^p, t^p is a line: floor^p + slope^p x. Divided by its t^p, each error is relative.
    xs = [float(rate.batch_size) ** power for rate in rates]
    ys = [(rate.batch_size / rate.samples_per_second) ** power for rate in rates]
    weights = [rate.rounds / y**2 for rate, y in zip(rates, ys, strict=True)]
    total = sum(weights)
    x_mean = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y_mean = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    points = [*zip(weights, xs, ys, strict=True)]
    slope = sum(w * (x - x_mean) * (y - y_mean) for w, x, y in points)
    slope /= sum(w * (x - x_mean) ** 2 for w, x, _ in points)
    floor = y_mean - slope * x_mean
    if floor < 0:
        floor = 0.0
        slope = sum(w * x * y for w, x, y in points) / sum(w * x * x for w, x, _ in points)
    elif slope < 0:
        floor, slope = y_mean, 0.0
    return [
        rate.batch_size / (floor + slope * x) ** (1 / power)
        for rate, x in zip(rates, xs, strict=True)
    ]


def _square(measured: Sequence[float], curve: Sequence[float]) -> float:
    """Return the mean square of the relative differences."""
    return statistics.mean((m / c - 1) ** 2 for m, c in zip(measured, curve, strict=True))


def _as_fast(
    rates: Sequence[float], errors: Sequence[float], margin: float, share: float = AS_FAST
) -> list[int]:
    """Return the indices of the rates within a share, and a margin in errors, of every other."""

    def is_as_fast(i: int, j: int) -> bool:
        error = math.hypot(errors[i], errors[j]) if i != j else 0.0
        return rates[i] >= (1 - share - margin * error) * rates[j]

    places = range(len(rates))
    return [i for i in places if all(is_as_fast(i, j) for j in places)]
