"""Where the answer of a search is, by what was read: a mixture of what may be going on.

Each part is the probability that the answer is at least some size. Verdicts truncate the parts, and
by Bayes' rule each keeps the weight that they leave of it: a part that was wrong dies, so that a
model that misleads turns into bisection by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from batchfinder.results.result import Probe
from batchfinder.search.bracket import Bracket

AtLeast: TypeAlias = Callable[[float], float]
"""The probability that the answer is at least some size."""

# A slope is taken between readings at least so far apart, as a share of the larger size.
APART = float(__import__("os").environ.get("AP", 0.9))
FAR_APART = float(__import__("os").environ.get("FAP", 0.5))

# How far off the end of a line is, as a share of the way there: two small readings tell no bend,
# and missed by up to 22 %; of a bend that a third one shows, about a third goes on.
UNTOLD_BEND = 0.08
MOST_BEND = 2.0


class Line(NamedTuple):
    """Where a line through readings meets the budget.

    Attributes:
        end: the size, not rounded; inf where nothing was seen to rise.
        error: how far off that may be, in examples.
    """

    end: float
    error: float


def line(
    points: Mapping[int, float], budget_bytes: float, noise_bytes: float = 0, near: float = APART
) -> Line:
    """Extend the line through the largest readings to the budget.

    Where peaks fall with the size, as another kernel is chosen, the next smaller reading gives the
    slope, and the error says how little that is worth.

    Args:
        points: the peak at each size, in bytes.
        budget_bytes: where the line ends.
        noise_bytes: added to what was seen to rise, as caution.

    Example:
        >>> line({1: 110, 5: 150}, 1000).end
        90.0
    """
    *lower, top = sorted(points)
    apart = [size for size in lower if size <= near * top] or lower[:1]
    rising = [size for size in apart if points[size] < points[top]]
    if not rising:
        return Line(math.inf, math.inf)
    base = rising[-1]
    slope = (points[top] - points[base] + noise_bytes) / (top - base)
    room = max(0.0, budget_bytes - points[top])
    end = top + room / slope
    before = [size for size in lower if size <= near * base]
    if base != apart[-1]:
        return Line(end, end - top)
    if not before:
        return Line(end, UNTOLD_BEND * (end - top))
    # A bend goes on: slopes are a power of the size.
    earlier = (points[base] - points[before[-1]]) / (base - before[-1])
    steeper = min(MOST_BEND, max(1 / MOST_BEND, slope / earlier if earlier > 0 else math.inf))
    power = math.log((end + top) / (top + base)) / math.log((top + base) / (base + before[-1]))
    bent = top + room / slope / steeper**power
    return Line(bent, abs(end - bent))


@dataclass(frozen=True)
class Lines:
    """Where what is held is going to meet the budget.

    Attributes:
        tensors: the first of the phases whose tensors do.
        allocator: where all that the allocator holds does; never beyond that.
    """

    tensors: Line
    allocator: Line


def lines_of(known: Bracket, noise_bytes: float = 0) -> Lines:
    """The lines through what was read.

    Slopes come from probes: a confirmation, from scratch, may read otherwise. Once one has refuted
    a probe they come from confirmations, and the smallest probe.
    """
    if known.is_refuted and known.confirmed:
        smallest = min(known.fits, default=min(known.confirmed))
        readings = {smallest: (known.fits | known.confirmed)[smallest]} | known.confirmed
    elif known.is_repeatable and len(known.fits) > 1:
        readings = known.fits
    else:
        readings = known.fits | known.confirmed
    readings = {size: probe for size, probe in readings.items() if size < known.high} or readings
    if len(readings) < 2:
        return Lines(*[Line(math.inf, math.inf)] * 2)
    top = readings[max(readings)]
    budget = known.budget_bytes
    ends = [
        line(
            {
                size: probe.phase_peak_bytes[phase]
                for size, probe in readings.items()
                if phase in probe.phase_peak_bytes
            },
            budget,
            noise_bytes,
        )
        for phase in top.phase_peak_bytes
    ]
    tensors = min(ends, default=Line(math.inf, math.inf))
    held = {size: float(probe.peak_reserved_bytes or 0) for size, probe in readings.items()}
    return Lines(tensors, min(tensors, line(held, budget, noise_bytes, FAR_APART)))


class Part(NamedTuple):
    """One thing that may be going on.

    Attributes:
        weight: how likely it is before any verdict.
        at_least: where the answer is then.
        floor: the size up to which verdicts have proved that it is no smaller.
    """

    weight: float
    at_least: AtLeast
    floor: float


class Belief:
    """A mixture, truncated by verdicts.

    Args:
        parts: at least one of which leaves some probability to what was not tried.
        high: the smallest size that failed.

    Attributes:
        doubt: the probability that a probe which fits proves nothing.
    """

    def __init__(self, parts: list[Part], low: float, high: float, least: float) -> None:
        self._parts = [
            (part.weight, part.at_least, at_high)
            for part in parts
            if part.at_least(part.floor) - (at_high := part.at_least(high)) > 0
        ]
        self._mass = sum(
            part.weight * max(0.0, part.at_least(part.floor) - part.at_least(high))
            for part in parts
        )
        self._least = least
        self.doubt = max(0.0, 1 - self.at_least(low))

    def at_least(self, size: float) -> float:
        """The probability that the answer is at least this size."""
        size = max(size, self._least)
        left = sum(weight * max(0.0, part(size) - end) for weight, part, end in self._parts)
        return min(1.0, left / self._mass)


def exact(end: float, deviation: float) -> AtLeast:
    """The answer is the last size up to ``end``."""
    return lambda size: 0.5 + math.atan((end - size) / deviation) / math.pi


def even(low: float, high: float) -> AtLeast:
    """The answer is anywhere between the two."""
    return lambda size: min(1.0, max(0.0, (high - size) / (high - low)))


def falling(top: float, scale: float) -> AtLeast:
    """The answer is below ``top``: twice as far below is half as likely."""
    return lambda size: 1 - scale / (scale + math.log(top / size)) if size < top else 0.0


def scale_free(middle: float, near: float) -> AtLeast:
    """The answer is around the middle; once it is known to be farther than ``near``, no distance is
    the usual one: twice as far is half as likely."""
    return lambda size: 0.5 + math.atan(math.log(middle / size) / near) / math.pi


def untold(low: float, high: float) -> AtLeast:
    """The answer is anywhere, in any order of magnitude."""
    width = math.log(high / low)
    return lambda size: min(1.0, max(0.0, math.log(high / size) / width))


def believe(known: Bracket, lines: Lines, guess: float | None = None) -> Belief:
    """Where the answer is, by the lines through what was read, and what was tried.

    Args:
        known: what was tried.
        lines: through its readings.
        guess: an estimate by something else than readings.
    """
    unit, high = known.unit, known.high
    confirmed = max(known.low_confirmed, unit / 4)
    low = max(known.low, unit / 4)
    parts = [Part(0.02, untold(unit / 4, high), low)]
    if guess is not None:
        parts.append(Part(GUESSED, scale_free(guess, GUESS_ERROR), low))
    (end, error), (easy, _) = lines.tensors, lines.allocator
    if math.isinf(end):
        return Belief(parts, low, high, unit / 4)
    error += 0.03 * unit
    is_fragmented = known.is_fragmented
    if not is_fragmented:
        easy = LEAST_HOLES * end
    w = FRAG if is_fragmented else PLAIN
    near = NEAR + error / end
    parts += [
        Part(w[0], exact(end, error), low),
        Part(w[1], exact(easy * (1 - EASY_MARGIN), EASY_SD * easy + error), low),
        Part(w[2], even(easy * (1 - 2 * EASY_MARGIN) - error, end * MOST_HELD + error), low),
        Part(w[3], scale_free(end * (CENTER if is_fragmented else .98), near), low),
        Part(w[4] if not known.is_refuted else 1, falling(end, MORE_SCALE), confirmed),
    ]
    return Belief(parts, low, high, unit / 4)

import os
def ev(n,d): return eval(os.environ.get(n,d))
FRAG = ev("FRAG","(0.03, 0.3, 0.25, 0.3, 0.08)")
PLAIN = ev("PLAIN","(0.62, 0.0, 0.2, 0.1, 0.06)")
CENTER=ev("CENTER",".965")
EASY_SD=ev("EASY_SD",".003")
NEAR=ev("NEAR",".008")
EASY_MARGIN = ev("EM",".002")
MOST_HELD = ev("MH",".985")
GUESSED, GUESS_ERROR = 1.0, 0.005
LEAST_HOLES = 0.96
MORE_SCALE = 0.08
