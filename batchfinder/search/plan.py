"""What to try next, and whether to confirm it at once: the cheapest way to the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from batchfinder.search.belief import Belief

# More candidates than this cost time and hardly save steps.
MOST_CANDIDATES = 30

# What a probe costs beside its steps, in steps at the size expected: without that, a plan would
# insure itself by many tiny probes.
OVERHEAD = 0.02


@dataclass
class Prices:
    """What moves cost, in steps at the size that is tried.

    Attributes:
        confirm: a confirmation that fits.
        failed_confirm: one that does not.
        failed_probe: a probe that does not; one that does is a step.
        launch: what comes on top of each where a process has to start for it, in steps at the size
            expected. Whoever launches may correct it while a search runs.
        resolution: how close the bracket is drawn at least, as a share of the size: closer is not
            worth a move.
    """

    confirm: float = 3
    failed_confirm: float = 1
    failed_probe: float = 1
    launch: float = 0
    resolution: float = 0


class Move(NamedTuple):
    """What to try next."""

    size: int
    confirm: bool


def candidates(
    belief: Belief, low: int, high: int, unit: int, resolution: Callable[[float], int]
) -> list[int]:
    """The sizes worth a thought, from ``low`` to ``high``, in both of which nothing is left to try.

    Down from ``high`` they are one resolution apart where that is not too many; else they are where
    the belief is, each with the one above whose failure would end the search.
    """
    step = resolution(high)
    if (high - low) // min(step, resolution(max(low, unit))) < MOST_CANDIDATES:
        return [low, *range(high - (high - low - 1) // step * step, high, step), high]
    sizes = {high - i * step for i in range(4)} | {low, low + step}
    top, count = belief.at_least(low), MOST_CANDIDATES // 2
    for i in range(count):
        below, above, share = float(low), float(high), top * (i + 0.5) / count
        while above - below > unit / 2:
            middle = (below + above) / 2
            below, above = (middle, above) if belief.at_least(middle) > share else (below, middle)
        size = math.floor(below / unit) * unit
        sizes |= {size, size + resolution(size)}
    return sorted(size for size in sizes if low <= size <= high)


def plan(
    belief: Belief,
    sizes: list[int],
    is_confirmed: bool,
    probes_prove: bool,
    prices: Prices,
    resolution: Callable[[float], int],
) -> Move:
    """The move with the fewest expected full-size steps.

    By dynamic programming over all brackets of candidates: ``costs[i][j]`` is what it takes from
    the i-th, which is proved, and the j-th, which failed; if the i-th is not confirmed, and if so.

    Args:
        belief: where the answer is.
        sizes: the candidates, at least three; the first is proved, the last one out.
        is_confirmed: whether the first one was confirmed.
        probes_prove: whether a probe that fits is worth anything.
        prices: of the moves.
        resolution: how close the bracket is drawn at a size.
    """
    count = len(sizes)
    odds_from = _odds(belief, sizes)
    each = (OVERHEAD + prices.launch) * _expected(belief, sizes)
    costs = [[(0.0, 0.0)] * count for _ in range(count)]
    best = Move(sizes[1], True)
    for width in range(1, count):
        for i in range(count - width):
            j = i + width
            low, high = sizes[i], sizes[j]
            end = resolution(high)
            if width == 1 or high - low <= end:
                rest = max(0.0, math.log2((high - low) / end)) * min(high, 2 * low)
                # A confirmation that refutes its probe costs about four more steps.
                last = (prices.confirm + 4 * belief.doubt) * low + each
                costs[i][j] = rest + last, rest
                continue
            mass = odds_from[i] - odds_from[j]
            least, moves = [math.inf, math.inf], [best, best]
            for k in range(i + 1, j):
                size = sizes[k]
                fits = (odds_from[k] - odds_from[j]) / mass if mass > 0 else (j - k) / (j - i)
                fails = 1 - fits
                confirm = fits * (prices.confirm * size + costs[k][j][1]) + each
                confirm += fails * prices.failed_confirm * size
                probe = fits * (size + costs[k][j][0]) + each
                probe += fails * prices.failed_probe * size
                is_best_confirmed = confirm < probe or not probes_prove
                now = confirm if is_best_confirmed else probe
                for known in (0, 1):
                    cost = now + fails * costs[i][k][known]
                    if cost < least[known]:
                        least[known], moves[known] = cost, Move(size, is_best_confirmed)
            costs[i][j] = least[0], least[1]
            best = moves[is_confirmed]
    return best


def _odds(belief: Belief, sizes: list[int]) -> list[float]:
    """How likely the answer is at least each size, up to a factor.

    Each answer counts by its inverse: costs are shares of it.
    """
    shares = [belief.at_least(size) for size in sizes[:-1]] + [0.0]
    odds = [0.0]
    for i in range(len(sizes) - 2, -1, -1):
        odds.append(
            odds[-1]
            + max(0.0, shares[i] - shares[i + 1])
            / (sizes[i] + min(sizes[i + 1], 2 * max(sizes[i], 1)))
        )
    return odds[::-1]


def _expected(belief: Belief, sizes: list[int]) -> float:
    """The largest candidate that the answer is as likely above as below."""
    return next((size for size in reversed(sizes[:-1]) if belief.at_least(size) > 0.5), sizes[0])
