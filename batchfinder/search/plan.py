"""What to try next, and whether to confirm it at once: the cheapest way to the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from batchfinder.search.belief import Belief


@dataclass(frozen=True)
class Prices:
    """What things cost, in steps at the size that is tried.

    Attributes:
        confirm: a confirmation that fits.
        failed_confirm: one that does not.
        launch: starting the process for anything, in steps at the size expected.
    """

    confirm: float = 3
    failed_confirm: float = 1
    failed_probe: float = 1
    launch: float = 0


class Move(NamedTuple):
    """What to try next."""

    size: int
    confirm: bool


def candidates(
    belief: Belief, low: int, high: int, unit: int, resolution: Callable[[float], int], most: int
) -> list[int]:
    """The sizes worth a thought, from ``low`` to ``high``, in both of which nothing is left to try.

    Down from ``high`` they lie one resolution apart where that is not too many; else they are where
    the belief is, each with the one above whose failure would end the search.
    """
    step = resolution(high)
    if (high - low) // step < most:
        return [low, *range(high - (high - low - 1) // step * step, high, step), high]
    sizes = {high - i * step for i in range(4)} | {low, low + step}
    top, count = belief.at_least(low), most // 2
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
    prices: Prices,
    resolution_at: Callable[[float], int],
    probes_prove: bool,
) -> Move:
    """The move with the fewest expected steps, by dynamic programming over brackets of candidates.

    Args:
        belief: where the answer is.
        sizes: the candidates; the first is proved, the last one out.
        is_confirmed: whether the first one was confirmed.
        prices: of each move.
        resolution_at: how close the bracket is drawn at a size.
        probes_prove: whether a probe that fits is worth anything.
    """
    n = len(sizes)
    # In steps at the answer's size: what a size costs is a share of that.
    share = [0.0]
    for i in range(n - 2, -1, -1):
        mass = belief.at_least(sizes[i]) - (belief.at_least(sizes[i + 1]) if i < n - 2 else 0)
        share.append(share[-1] + max(0.0, mass) / (sizes[i] + sizes[i + 1]))
    share.reverse()
    launch = prices.launch * sizes[-1]
    doubt = belief.doubt
    # cost[i][j]: from a bracket on, unless its lower end is confirmed, and if it is.
    cost = [[(0.0, 0.0)] * n for _ in range(n)]
    best = Move(sizes[0], True)
    for width in range(1, n):
        for i in range(n - width):
            j = i + width
            low, high = sizes[i], sizes[j]
            resolution = resolution_at(high)
            confirmation = prices.confirm * low + launch + doubt * 4 * low
            if width == 1 or high - low <= resolution:
                rest = max(0.0, math.log2((high - low) / resolution)) * high
                cost[i][j] = rest + confirmation, rest
                continue
            mass = share[i] - share[j]
            least = [math.inf, math.inf]
            for k in range(i + 1, j):
                size = sizes[k]
                odds = (share[k] - share[j]) / mass if mass > 1e-12 else (j - k) / (j - i)
                fits_c = odds * (prices.confirm * size + cost[k][j][1])
                fits_c += (1 - odds) * prices.failed_confirm * size + launch
                fits_p = odds * (size + cost[k][j][0]) + (1 - odds) * prices.failed_probe * size + launch
                if not probes_prove:
                    fits_p = math.inf
                for c in (0, 1):
                    fails = (1 - odds) * cost[i][k][c]
                    if fits_c + fails < least[c]:
                        least[c] = fits_c + fails
                        if width == n - 1 and c == is_confirmed:
                            best = Move(size, True)
                    if fits_p + fails < least[c]:
                        least[c] = fits_p + fails
                        if width == n - 1 and c == is_confirmed:
                            best = Move(size, False)
            cost[i][j] = least[0], least[1]
    return best
