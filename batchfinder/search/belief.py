"""The belief about where a search's answer is: a mixture of hypotheses, given what was read.

Each gives the probability that the answer is at least some size. Verdicts truncate them. By Bayes'
rule, each keeps the weight that the verdicts leave of it. A wrong one loses its weight, so a search
with a misleading model becomes a bisection by itself.

The constants are from 48 searches on a simulated H200, which
``python scripts/benchmarks/bench_search.py --simulated`` repeats, and from the families of
tests/search/test_costs.py. They were chosen on these, so other searches may cost more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from batchfinder.search.bracket import Bracket
from batchfinder.search.head_start import Guess

AtLeast: TypeAlias = Callable[[float], float]
"""The probability that the answer is at least some size."""

# The hypotheses' weights: memory ends where its line does; an allocator loses some of it to holes;
# later steps need more than the first; the answer is anywhere; an estimate is right.
EXACT, HOLES, LATER, ANYWHERE, ESTIMATE = 0.6, 0.35, 0.15, 0.02, 10

# What is lost to holes, and to later steps, as a share of the size, in the median. Twice the median
# is lost in one of five or of four searches, by this power.
HOLES_SHARE, HOLES_POWER = 0.045, 2.0
LATER_SHARE, LATER_POWER = 0.06, 1.5

# How near an answer is, as a share, to the end of an allocator's line
# (scripts/benchmarks/bench_counted_search.py).
SEGMENTS = 0.002

# Sizes are whole numbers, so an exact line ends between two of them. No more is known of its end.
FRACTION = 0.03

# The answer is hardly ever below this share of the largest size that ran, proved or not.
LEAST_OF_RAN = 1 / 4

# A slope needs two readings, the smaller at no more than this share of the larger size. They have
# to be farther apart if readings differ from run to run, or if an allocator holds whole segments.
APART, APART_WHERE_SEGMENTS = 0.9, 0.5

# The error of a line's end, as a share of the way there, if it has only two readings: up to 22 % of
# the size. If three readings show a bend, no more than the factor MOST_BEND is believed.
UNTOLD_BEND, MOST_BEND = 0.08, 2.0


class Line(NamedTuple):
    """The batch size at which a line through readings meets the budget.

    Attributes:
        end: the batch size, not rounded; inf if no memory was seen to rise.
        error: how far off the end may be, in examples.
    """

    end: float
    error: float


NO_LINE = Line(math.inf, math.inf)


class Part(NamedTuple):
    """One hypothesis: its weight, its distribution of the answer, and the size that is proved."""

    weight: float
    at_least: AtLeast
    floor: float


class Belief:
    """A mixture of hypotheses, truncated by verdicts.

    Args:
        parts: the hypotheses. By the first one, larger sizes run out of memory only after their
            first step.
        high: the smallest size that failed.
    """

    def __init__(self, parts: list[Part], high: float) -> None:
        self._parts = [(*part, part.at_least(high)) for part in parts]
        self._mass = sum(self._above(0)) or 1.0

    def at_least(self, size: float) -> float:
        """Return the probability that the answer is at least this size."""
        return sum(self._above(size)) / self._mass

    def at_least_and_later(self, size: float) -> float:
        """Return the probability of that, and that larger sizes fail after their first step."""
        return self._above(size)[0] / self._mass

    def _above(self, size: float) -> list[float]:
        return [
            weight * max(0.0, at_least(max(size, floor)) - end)
            for weight, at_least, floor, end in self._parts
        ]


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
        >>> round(line({1: 110, 5: 150}, 1000).end)
        90
    """
    *lower, top = sorted(points) or [0]
    bases = [size for size in lower if size <= apart * top] or lower[:1]
    rising = [size for size in bases if points[size] < points[top]]
    if not rising:
        return NO_LINE
    base = rising[-1]
    slope = (points[top] - points[base] + noise_bytes) / (top - base)
    # Readings that are all multiples of a block are half a block too large on average.
    block = math.gcd(*(round(peak) for peak in points.values()))
    budget_bytes += block / 2 - budget_bytes % block
    # With a smaller budget, the line may end below the largest reading, but not below the smaller.
    reach = max((budget_bytes - points[top]) / slope, base - top)
    if base != bases[-1]:
        return Line(top + reach, abs(reach))
    error = block / 2 / slope
    before = max((size for size in lower if size <= apart * base), default=0)
    if not before or reach <= 0:
        return Line(top + reach, error + UNTOLD_BEND * abs(reach))
    # The bend continues: the slope is a power of the size.
    earlier = (points[base] - points[before]) / (base - before)
    steeper = min(MOST_BEND, max(1 / MOST_BEND, slope / earlier if earlier > 0 else math.inf))
    power = math.log((2 * top + reach) / (top + base), (top + base) / (base + before))
    bent = reach / min(MOST_BEND, max(1 / MOST_BEND, steeper**power))
    return Line(top + bent, error + abs(reach - bent))


def lines_of(known: Bracket, noise_bytes: float = 0) -> tuple[Line, Line]:
    """Return where tensors meet the budget, and where all that the allocator holds does.

    Slopes come from probes, because a confirmation starts from scratch and may read differently. If
    confirmations need more, the budget counts as smaller by that factor. Each phase has a line; the
    one that ends first counts.
    """
    readings = known.fits if known.is_repeatable and len(known.fits) > 1 else known.readings
    readings = {size: probe for size, probe in readings.items() if size < known.high} or readings
    budget_bytes = known.budget_bytes / known.excess
    peaks: dict[object, dict[int, float]] = {}
    for size, probe in readings.items():
        for phase, peak in probe.phase_peak_bytes.items():
            peaks.setdefault(phase, {})[size] = peak
    apart = APART if known.verdicts_repeat else APART_WHERE_SEGMENTS
    ends = (line(points, budget_bytes, noise_bytes, apart) for points in peaks.values())
    tensors = min(ends, default=NO_LINE)
    held = {size: float(probe.peak_reserved_bytes or 0) for size, probe in readings.items()}
    return tensors, min(tensors, line(held, budget_bytes, noise_bytes, APART_WHERE_SEGMENTS))


def end_from_zero(known: Bracket) -> float:
    """Return where memory ends if the largest peak came from its examples alone."""
    return known.ran * known.budget_bytes / (known.readings[known.ran].peak_bytes or 1)


def around(end: float, deviation: float) -> AtLeast:
    """Return the belief that the answer is near a size.

    Far from it, twice as far is half as likely. With thinner tails, a plan would crawl in single
    steps once the answer is known to be farther than the deviation.
    """
    return lambda size: 0.5 + math.atan((end - size) / deviation) / math.pi


def below(top: float, share: float, power: float) -> AtLeast:
    """Return the belief that the answer is below a size: by this share of it in the median."""
    return lambda size: 1 - 1 / (1 + (max(0.0, 1 - size / top) / share) ** power)


def anywhere(low: float, high: float) -> AtLeast:
    """Return the belief that the answer has any order of magnitude between two sizes."""
    return lambda size: min(1.0, math.log(high / size, high / low)) if size < high else 0.0


def believe(known: Bracket, estimate: Guess | None = None) -> Belief:
    """Return the belief about where the answer is, by lines through readings and the sizes tried.

    Args:
        known: the sizes tried.
        estimate: an estimate of the answer that does not come from readings; None without one.
    """
    # A requested maximum says nothing about memory: if more would fit, the answer is the maximum.
    high = known.high if known.failure else math.inf
    low, least = max(known.low, known.bounds.multiple_of / 4), LEAST_OF_RAN * known.ran
    tensors, allocator = lines_of(known)
    later = Part(0, lambda size: 0, low)
    parts = [Part(ANYWHERE, anywhere(max(low, least), known.high), max(low, least))]
    if estimate is not None:
        parts.append(Part(ESTIMATE, around(estimate.size, estimate.deviation * estimate.size), low))
    if math.isfinite(tensors.end):
        top = known.refuted or max(known.ran, tensors.end)
        floor = max(known.low_confirmed, known.bounds.multiple_of / 4, least)
        later = Part(LATER, below(top, LATER_SHARE, LATER_POWER), floor)
        doubt = FRACTION * known.bounds.multiple_of + known.excess_error * tensors.end
        # Where steps differ, blocks for other lengths are cached up to the budget at any size.
        by_allocator = known.is_fragmented and not known.steps_differ
        segments = SEGMENTS * allocator.end if by_allocator else 0
        end, error = allocator if by_allocator else tensors
        # Once a confirmation has refuted a probe, a line that ends above it was wrong.
        if not known.refuted or end < known.high:
            parts.append(Part(EXACT, around(end - segments, error + doubt + segments), low))
        if not known.refuted or tensors.end < known.high:
            top = sum(tensors) + doubt
            parts.append(Part(HOLES, below(top, HOLES_SHARE, HOLES_POWER), low))
    return Belief([later, *parts], high)
