"""Plan the cheapest way to the answer: the next size, and whether to confirm it at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from batchfinder.search.belief import Belief
from batchfinder.search.bracket import Bracket

# Host memory is not limited, so growth per move is capped. A size is at most this many times the
# largest that has run, if the memory was seen to rise, and if it was not.
MEASURED_GROWTH, BLIND_GROWTH = 1024, 16

# The second size is at most this many times the first: large enough to show a slope, and cheap.
SECOND_GROWTH = 64

# Where lines are unsure, sizes grow by this factor; where guesses are, their steps do.
SURE_GROWTH = 4

# More candidates than this cost time and hardly save steps.
MOST_CANDIDATES = 30

# The cost of a probe besides its steps, in steps at the expected size. Without it, a plan would
# hedge with many tiny probes.
OVERHEAD = 0.012

# If a size only runs by flushing the allocator's cache, a probe runs two steps to show it.
THRASHING_PROBE = 2

# Fraction of the budget kept free if batches vary in length, because other orders of the same
# batches need more: of 20 orders at 124 of set-up varying-bert-24
# (scripts/benchmarks/parts/setup_list.py), 30 steps each, one ran out of memory, at 127 fifteen.
# With half of that room, a SentenceTransformer got 116 of 16 GiB: one training of six ran out of
# memory, and four did at 114 and 115, each in its second or third step. With it, 113: none did.
VARIED_ROOM = 0.05

# Fraction of the budget kept free in replays of steps that differ: training will make steps that
# were not recorded. With 5 % free, 280 of wav2vec2-80 passed in one search of ten, and ran out of
# memory in one loop of four.
DIFFERING_ROOM = 0.1

# The work that is left after a confirmation has refuted a probe, in steps at that size.
REFUTED = 4


@dataclass
class Prices:
    """The costs of moves, in steps at the size that is tried. A probe costs one.

    Attributes:
        confirm: a confirmation. It costs only one step if it fails in that one.
        launch: the extra cost of each move if a process has to start for it, in steps at the
            expected size. The prober may correct it while a search runs.
        resolution: the least width of the final bracket, as a share of the size. A narrower one is
            not worth a move.
        room: the share of the budget that steps leave free. It guides the belief.
        probes_prove: False if a size that ran one step may well run out of memory in the next.
    """

    confirm: float = 3
    launch: float = 0
    resolution: float = 0
    room: float = 0
    probes_prove: bool = True


class Move(NamedTuple):
    """The size to try next, and whether to confirm it."""

    size: int
    confirm: bool


def move_to(known: Bracket, size: float, *, confirm: bool = False) -> Move:
    """Return a move to a size inside the bracket; a confirmation if a probe would not help."""
    bounds = known.bounds
    on_grid = bounds.at_most(min(size, known.high))
    on_grid = min(max(on_grid, bounds.after(known.low)), bounds.before(known.high))
    would_end = known.high - on_grid <= known.resolution
    return Move(on_grid, confirm or would_end or not known.probes_prove)


def candidates(belief: Belief, known: Bracket, high: int) -> list[int]:
    """Return the sizes to consider, from the largest that is proved to ``high``, which is excluded.

    They are one resolution apart, counted from both ends, because a failure of one counted up from
    ``low`` ends the search, and a fit of one counted down from ``high`` does. If that would be too
    many, most are where the belief is, each with the one above it.
    """
    low, bounds, coarseness_at = known.low, known.bounds, known.coarseness_at

    def lower(size: int) -> int:
        return min(bounds.before(size), bounds.at_most(size - coarseness_at(size)))

    def upper(size: int) -> int:
        return max(bounds.after(size), bounds.at_most(size + coarseness_at(size)))

    # Without a failure, the answer may be the last size, which ends the search like no other.
    sizes = {low, high} if known.failure else {low, high, bounds.before(high)}
    many = bounds.steps_between(low, high) >= MOST_CANDIDATES
    apart = coarseness_at(max(low, bounds.multiple_of))
    many &= not apart or (high - low) // apart >= MOST_CANDIDATES
    least, most = low, high
    for _ in range(3 if many else MOST_CANDIDATES):
        least, most = upper(least), lower(most)
        sizes |= {most} if many else {least, most}
    top, count = belief.at_least(low), MOST_CANDIDATES // 2
    for i in range(count if many else 0):
        below, above, share = float(low), float(high), top * (i + 0.5) / count
        while above - below > bounds.multiple_of / 2:
            middle = (below + above) / 2
            below, above = (middle, above) if belief.at_least(middle) > share else (below, middle)
        size = bounds.at_most(below)
        sizes |= {size, upper(size)}
    return sorted(size for size in sizes if low <= size <= high)


def plan(belief: Belief, known: Bracket, sizes: list[int], prices: Prices) -> Move:
    """Return the move with the fewest expected full-size steps.

    This is dynamic programming over all brackets of candidates. ``costs[i][j]`` is the cost from
    a bracket to the answer, if the i-th size is proved and the j-th has failed. Its two numbers are
    for an i-th size that is not confirmed, and for one that is.

    Args:
        belief: the belief about where the answer is.
        known: the bracket so far.
        sizes: the candidates, at least three. The first is proved, the last is excluded.
        prices: the costs of the moves.
    """
    count = len(sizes)
    probes_prove = known.verdicts_repeat and known.probes_prove
    shares = [belief.at_least(size) for size in sizes[:-1]]
    later = [belief.at_least_and_later(size) for size in sizes[:-1]]
    doubt = REFUTED * later[0] if probes_prove else 0.0
    odds = _odds_from(shares, sizes)
    # Where probes prove nothing, confirmations that fail after their first step cost more.
    odds_later = [0.0] * count if probes_prove else _odds_from(later, sizes)
    expected = max((n for n, share in zip(sizes, shares, strict=False) if share > 0.5), default=0)
    each = (OVERHEAD + prices.launch) * expected
    ends = [known.resolution_at(size) for size in sizes]
    thrashes = known.failure is not None and known.failure.is_thrashing
    failed_probe, failed_confirm = (THRASHING_PROBE, prices.confirm) if thrashes else (1, 1)
    was_confirmed = sizes[0] in known.confirmed
    costs = [[(0.0, 0.0)] * count for _ in range(count)]
    best = Move(sizes[1], True)
    for i, j in ((i, i + width) for width in range(1, count) for i in range(count - width)):
        low, high = sizes[i], sizes[j]
        is_open = known.failure is None and j == count - 1
        end = known.bounds.multiple_of if is_open else ends[j]
        if j == i + 1 or high - low <= end:
            rest = max(0.0, math.log2((high - low) / end)) * min(high, 2 * low)
            costs[i][j] = rest + (prices.confirm + doubt) * low + each, rest
            continue
        mass = odds[i] - odds[j]
        least = [math.inf, math.inf]
        for k in range(i + 1, j):
            size = sizes[k]
            fits = (odds[k] - odds[j]) / mass if mass > 0 else (j - k) / (j - i)
            fails_later = (odds_later[i] - odds_later[k]) / mass if mass > 0 else 0.0
            fails = max(0.0, 1 - fits - fails_later)
            spent = (fits + fails_later) * prices.confirm + fails * failed_confirm
            cost = spent * size + fits * costs[k][j][1]
            probe = (fits + fails * failed_probe) * size + fits * costs[k][j][0]
            is_confirmed = cost <= probe or not probes_prove
            cost = each + (cost if is_confirmed else probe)
            for is_proved in (0, 1):
                total = cost + (1 - fits) * costs[i][k][is_proved]
                if total < least[is_proved]:
                    least[is_proved] = total
                    if is_proved == was_confirmed:
                        best = Move(size, is_confirmed)
        costs[i][j] = least[0], least[1]
    return best


def _odds_from(shares: list[float], sizes: list[int]) -> list[float]:
    """Return the odds of an answer at each size or above, by the probabilities of that.

    Each answer is weighted by its inverse, because costs are shares of the answer.
    """
    steps = [
        max(0.0, above - below) / (low + min(high, 2 * max(low, 1)))
        for (above, below), (low, high) in zip(
            pairwise([*shares, 0.0]), pairwise(sizes), strict=True
        )
    ]
    return [*accumulate(reversed(steps), initial=0.0)][::-1]
