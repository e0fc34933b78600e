"""The belief where a search's answer is: a mixture of hypotheses, given what was read.

Each part gives the probability that the answer is at least some size. Verdicts truncate the parts.
By Bayes' rule, each keeps the weight that the verdicts leave of it. A wrong part loses its weight,
so a search with a misleading model becomes a bisection by itself.

Weights and distances below were fitted to 48 searches on a simulated H200, which
``python scripts/benchmarks/bench_search.py --simulated`` repeats, and to the families of
tests/search/test_costs.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from batchfinder.search.bracket import Bracket

AtLeast: TypeAlias = Callable[[float], float]
"""The probability that the answer is at least some size."""

# A slope needs two readings, the smaller at no more than this share of the larger size. They have
# to be farther apart if readings differ from run to run, or if an allocator holds whole segments.
APART = 0.9
APART_WHERE_SEGMENTS = 0.5

# The error of a line's end, as a share of the way there, if it has only two readings: up to 22 % of
# the size. If three readings show a bend, no more than the factor MOST_BEND is believed.
UNTOLD_BEND = 0.08
MOST_BEND = 2.0

# The weight of each part, if the allocator holds no more than its tensors, and if it holds more.
PLAIN = {"exact": 0.62, "served": 0.0, "between": 0.2, "near": 0.1, "more": 0.06}
FRAGMENTED = {"exact": 0.1, "served": 0.4, "between": 0.2, "near": 0.1, "more": 0.2}
# The weights if verdicts do not repeat: later steps may need more than a probe read.
WANDERING = {"exact": 0.6, "served": 0.0, "between": 0.1, "near": 0.2, "more": 0.2}
UNTOLD = 0.02  # the weight of an answer anywhere

# The answer is hardly ever below this share of the largest size that ran, proved or not.
LEAST_OF_RAN = 1 / 4

# The answer with a caching allocator, as a share of the end of the tensors' line. It was 0.965 in
# 20 of 20 searches after a reading at three quarters, and hardly ever above 0.985. If the
# allocator's memory shows no holes, they use 4 % at most.
CACHED, CACHED_DEVIATION = 0.964, 0.006
MOST_CACHED = 0.985
PLAIN_CACHED, LEAST_PLAIN = 0.98, 0.96

# In 17 of the 48 searches, the answer is the end of the allocator's line, within 0.2 %.
SERVED, SERVED_DEVIATION = 0.998, 0.002

# The weight of "more" once a confirmation has refuted a probe: the likeliest part by far.
MORE_WHEN_REFUTED = 3.0

# How much more steps need than a probe, as a share of the size, in the median.
MORE = 0.06

# A confirmation that reads at most this share more than probes counts as equal to them.
EXPLAINED = 1 / 200

# An estimate's error, as a share of it (scripts/benchmarks/bench_counted_search.py); its weight.
ESTIMATE_DEVIATION = 0.005
ESTIMATE = 10


class Line(NamedTuple):
    """The end of a line through readings, where it meets the budget.

    Attributes:
        end: the batch size, not rounded; inf if no memory was seen to rise.
        error: how far off the end may be, in examples.
    """

    end: float
    error: float


NO_LINE = Line(math.inf, math.inf)


class Lines(NamedTuple):
    """The batch sizes at which memory will meet the budget.

    Attributes:
        tensors: the end of the line of what tensors hold.
        allocator: the end of the line of all that the allocator holds.
    """

    tensors: Line
    allocator: Line


class Part(NamedTuple):
    """One hypothesis: its weight, its distribution of the answer, and the size that is proved."""

    weight: float
    at_least: AtLeast
    floor: float


class Belief:
    """A mixture of hypotheses, truncated by verdicts.

    Args:
        parts: the hypotheses.
        high: the smallest size that failed.
        doubt: the probability that a probe that fits proves nothing.
    """

    def __init__(self, parts: list[Part], high: float, doubt: float = 0) -> None:
        self.doubt = doubt
        self._parts = [(*part, part.at_least(high)) for part in parts if part.floor < high]
        self._mass = self._above(0)

    def at_least(self, size: float) -> float:
        """Return the probability that the answer is at least this size."""
        return self._above(size) / self._mass if self._mass else 0.0

    def _above(self, size: float) -> float:
        return sum(
            weight * max(0.0, at_least(max(size, floor)) - end)
            for weight, at_least, floor, end in self._parts
        )


def line(
    points: Mapping[int, float], budget_bytes: float, noise_bytes: float = 0, apart: float = APART
) -> Line:
    """Extend the line through the largest readings to the budget.

    Peaks may fall with the size, because another kernel is chosen. Then a smaller reading gives the
    slope, and the error is as large as the way to the end.

    Args:
        points: the peak at each size, in bytes.
        budget_bytes: the peak at which the line ends.
        noise_bytes: added to the rise that was seen, as caution.
        apart: the smaller reading of a slope is at most this share of the larger size.

    Example:
        >>> line({1: 110, 5: 150}, 1000).end
        90.0
    """
    if len(points) < 2:
        return NO_LINE
    *lower, top = sorted(points)
    bases = [size for size in lower if size <= apart * top] or lower[:1]
    rising = [size for size in bases if points[size] < points[top]]
    if not rising:
        return NO_LINE
    base = rising[-1]
    slope = (points[top] - points[base] + noise_bytes) / (top - base)
    # With a smaller budget, the line may end below the largest reading, but not below the smaller.
    reach = max((budget_bytes - points[top]) / slope, base - top)
    if base != bases[-1]:
        return Line(top + reach, abs(reach))
    before = [size for size in lower if size <= apart * base]
    if not before or reach <= 0:
        return Line(top + reach, UNTOLD_BEND * abs(reach))
    # The bend continues: the slope is a power of the size.
    earlier = (points[base] - points[before[-1]]) / (base - before[-1])
    steeper = min(MOST_BEND, max(1 / MOST_BEND, slope / earlier if earlier > 0 else math.inf))
    power = math.log((2 * top + reach) / (top + base)) / math.log(
        (top + base) / (base + before[-1])
    )
    bent = reach / steeper**power
    return Line(top + bent, abs(reach - bent))


def lines_of(known: Bracket, noise_bytes: float = 0) -> Lines:
    """Return the ends of the lines through the readings; of the phases, the one that ends first.

    Slopes come from probes, because a confirmation starts from scratch and may read differently. If
    one read more than probes at its size, the budget counts as smaller by that factor.
    """
    readings = known.fits
    if not known.is_repeatable or len(readings) < 2:
        readings = known.fits | known.confirmed
    more = excess(known)
    readings = {size: probe for size, probe in readings.items() if size < known.high} or readings
    budget_bytes = known.budget_bytes / more
    phases = {phase for probe in readings.values() for phase in probe.phase_peak_bytes}
    peaks = [
        {
            size: float(probe.phase_peak_bytes[phase])
            for size, probe in readings.items()
            if phase in probe.phase_peak_bytes
        }
        for phase in phases
    ]
    apart = APART if known.verdicts_repeat else APART_WHERE_SEGMENTS
    ends = (line(points, budget_bytes, noise_bytes, apart) for points in peaks)
    tensors = min(ends, default=NO_LINE)
    held = {size: float(probe.peak_reserved_bytes or 0) for size, probe in readings.items()}
    served = line(held, budget_bytes, noise_bytes, APART_WHERE_SEGMENTS)
    return Lines(tensors, min(tensors, served))


def excess(known: Bracket) -> float:
    """Return the factor by which the largest confirmation read more than probes at its size."""
    size = max(known.confirmed, default=0)
    readings = known.confirmed[size].phase_peak_bytes if size else {}
    if not readings:
        return 1
    phase = max(readings, key=lambda phase: readings[phase])
    peaks = {n: probe.phase_peak_bytes.get(phase, 0) for n, probe in known.fits.items()}
    above = min((n for n in peaks if n >= size), default=max(peaks, default=0))
    below = max((n for n in peaks if n <= APART * above), default=0)
    if not below:
        return 1
    probed = peaks[below] + (size - below) * (peaks[above] - peaks[below]) / (above - below)
    more = readings[phase] / probed if probed > 0 else 1
    return more if more > 1 + EXPLAINED else 1


def around(end: float, deviation: float) -> AtLeast:
    """Return the belief that the answer is near a size.

    Far from it, twice as far is half as likely. With thinner tails, a plan would crawl in single
    steps once the answer is known to be farther than the deviation.
    """
    return lambda size: 0.5 + math.atan((end - size) / deviation) / math.pi


def between(low: float, high: float) -> AtLeast:
    """Return the belief that the answer is anywhere between two sizes."""
    return lambda size: min(1.0, max(0.0, (high - size) / (high - low)))


def below(top: float, scale: float) -> AtLeast:
    """Return the belief that the answer is below a size: by the share ``scale`` in the median."""
    return lambda size: 1 - scale / (scale + 1 - size / top) if size < top else 0.0


def anywhere(low: float, high: float) -> AtLeast:
    """Return the belief that the answer has any order of magnitude between two sizes."""
    width = math.log(high / low)
    return lambda size: min(1.0, math.log(high / size) / width) if size < high else 0.0


def believe(known: Bracket, lines: Lines, estimate: float | None = None) -> Belief:
    """Return the belief where the answer is, by the lines through readings and the sizes tried.

    Args:
        known: the sizes tried.
        lines: the ends of the lines through its readings.
        estimate: an estimate of the answer that does not come from readings; None without one.
    """
    # A requested maximum says nothing about memory: if more would fit, the answer is the maximum.
    least, high = known.unit / 4, known.high if known.failure else math.inf
    low, confirmed = max(known.low, least), max(known.low_confirmed, least)
    bottom = max(low, LEAST_OF_RAN * known.ran)
    parts = [Part(UNTOLD, anywhere(bottom, known.high), bottom)]
    if estimate is not None:
        parts.append(Part(ESTIMATE, around(estimate, ESTIMATE_DEVIATION * estimate), low))
    end, error = lines.tensors
    if math.isinf(end):
        return Belief(parts, high)
    # Sizes are whole: an exact line ends between two of them.
    error += 0.03 * known.unit + known.spread * end
    weights = FRAGMENTED if known.is_fragmented else PLAIN
    served = (lines.allocator.end if known.is_fragmented else LEAST_PLAIN * end) * SERVED
    near = (CACHED if known.is_fragmented else PLAIN_CACHED) * end
    if not known.verdicts_repeat:
        weights = WANDERING
    top = known.refuted or max(known.ran, end)
    more = MORE_WHEN_REFUTED if known.refuted else weights["more"]
    parts.append(Part(more, below(top, MORE), max(confirmed, LEAST_OF_RAN * known.ran)))
    # Once a confirmation has refuted a probe, a line that ends above it was wrong.
    if not known.refuted or end < known.high:
        parts.append(Part(weights["exact"], around(end, error), low))
        parts.append(Part(weights["near"], around(near, CACHED_DEVIATION * end + error), low))
    if not known.refuted or served < known.high:
        bounds = served * SERVED - error, end * MOST_CACHED + error
        parts.append(Part(weights["between"], between(*bounds), low))
        deviation = SERVED_DEVIATION * served + error
        parts.append(Part(weights["served"], around(served, deviation), low))
    return Belief(parts, high, 0 if known.refuted else weights["more"])
