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

# The median of readings varies this many times as much as their mean, if they are normal.
MEDIAN_ERROR = 1.2533

# The standard deviation is this many times the median deviation, if they are normal.
NORMAL_DEVIATION = 1.4826

# The time of a step combines a floor and a line in the batch size n: t^p = floor^p + (slope n)^p.
# Power 1 is their sum. Large powers are their maximum, as on a GPU that small batches do not fill.
POWERS = (1, 2, 4, 8)

# A curve is used if it is off by at most this fraction, or by this many standard errors.
OFF_CURVE = 0.02
OFF_ERRORS = 3.5

# With a larger standard error, no curve is fitted and no knee is clear.
MOST_ERROR = 0.1

# A size timed twice has drifted if its medians differ by more than this many standard errors.
DRIFT_ERRORS = 3


@dataclass(frozen=True)
class Rate(Record):
    """The speed of training at one batch size.

    Attributes:
        batch_size: examples per device per forward/backward pass.
        samples_per_second: examples per second and device, by the median of the steps.
        spread: the standard deviation of the steps, as a fraction.
        steps: the number of timed steps, without the first of each run.
    """

    batch_size: int
    samples_per_second: float
    spread: float
    steps: int

    @property
    def error(self) -> float:
        """The standard error of the rate, as a fraction."""
        return MEDIAN_ERROR * self.spread / math.sqrt(self.steps)


@dataclass(frozen=True)
class Throughput(Record):
    """The speed of training at several batch sizes.

    Attributes:
        rates: the rate at each batch size, the smallest first.
        knee: the smallest of these sizes whose rate is within 2 % of the best.
        is_clear: False if the steps differ too much to distinguish the knee from two sizes away, or
            drift too much to distinguish it from the next.
    """

    rates: tuple[Rate, ...]
    knee: int
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


def throughput_of(seconds: Mapping[int, Sequence[float]], drift: float = 0.0) -> Throughput:
    """Return the rates and the knee.

    Args:
        seconds: the duration of each step, by batch size: at least one size with one step each.
        drift: the difference between two timings of one size, first and last, as a fraction.

    Example:
        >>> throughput_of({n: [0.1 + n / 100] * 4 for n in (100, 200, 400, 800)}).knee
        400
    """
    spread = _spread(seconds)
    rates = [
        Rate(size, size / statistics.median(of_size), spread, len(of_size))
        for size, of_size in sorted(seconds.items())
    ]
    smooth, error = _smoothed(rates)
    has_drifted = drift > DRIFT_ERRORS * max(rate.error for rate in rates)
    error += drift * has_drifted
    low, knee, high = (_knee(smooth, margin) for margin in (error, 0, -error))
    off_by = 0 if has_drifted else 1  # sizes that the knee may be off by
    is_clear = max(knee - low, high - knee) <= off_by and error <= MOST_ERROR
    return Throughput(tuple(rates), rates[knee].batch_size, is_clear)


def _spread(seconds: Mapping[int, Sequence[float]]) -> float:
    """Return the standard deviation of steps around the median of their size, as a fraction.

    It comes from the median of the deviations, so a single delayed step does not count.
    """
    deviations: list[float] = []
    for of_size in seconds.values():
        median = statistics.median(of_size)
        deviations += [abs(second / median - 1) for second in of_size]
    freedom = len(deviations) - len(seconds)
    if freedom < 1:
        return 0.0
    return NORMAL_DEVIATION * statistics.median(deviations) * len(deviations) / freedom


def _smoothed(rates: Sequence[Rate]) -> tuple[list[float], float]:
    """Return the rates on a curve through them, if one is close enough, and their error."""
    measured = [rate.samples_per_second for rate in rates]
    error = max(rate.error for rate in rates)
    if len(rates) < 4 or error > MOST_ERROR:
        return measured, error
    fits = [_fit(rates, power) for power in POWERS]
    curve = min(fits, key=lambda fit: _distance(measured, fit))
    if _distance(measured, curve) > max(OFF_CURVE, OFF_ERRORS * error):
        return measured, error
    return curve, error * math.sqrt(2 / len(rates))


def _fit(rates: Sequence[Rate], power: int) -> list[float]:
    """Return the rates on the nearest curve with this power, by relative least squares."""
    # In x = n^p, t^p is a line: floor^p + slope^p x. Divided by its t^p, each error is relative.
    xs = [float(rate.batch_size) ** power for rate in rates]
    ys = [(rate.batch_size / rate.samples_per_second) ** power for rate in rates]
    weights = [rate.steps / y**2 for rate, y in zip(rates, ys, strict=True)]
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


def _distance(measured: Sequence[float], curve: Sequence[float]) -> float:
    """Return the root mean square of the relative differences."""
    squares = ((m / c - 1) ** 2 for m, c in zip(measured, curve, strict=True))
    return math.sqrt(sum(squares) / len(measured))


def _knee(rates: Sequence[float], margin: float) -> int:
    """Return the index of the first rate within 2 %, and a margin, of the best."""
    enough = (1 - AS_FAST - margin) * max(rates)
    return next((i for i, rate in enumerate(rates) if rate >= enough), len(rates) - 1)
