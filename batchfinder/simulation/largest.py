"""The search for the largest size that fits on paper, where a try costs milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

# So many tries may fail to halve what is left, before what they tell of the room is not believed.
_PATIENCE = 2

# Sizes that leave fewer gaps between blocks than their neighbours are multiples of this.
_ROUND = 8


def largest_that_fits(
    room: Callable[[int], float],
    bound: int,
    *,
    smallest: int = 1,
    multiple_of: int = 1,
    expected: float | None = None,
) -> int:
    """The largest size that fits; 0 if not even the smallest does.

    The size above it was tried and does not fit, or is out of bounds; nor does the next that is
    also a multiple of 8. That a still larger one fits, by the chance of how tensors come to lie,
    may stay unseen.

    Args:
        room: how many more examples fit beside so many, roughly; below 0: how many less do.
        bound: no size above fits, and the answer is a few percent below: fragmentation is all
            that the bound of a trace leaves out.
        smallest: no size below is tried.
        multiple_of: only multiples of this are tried.
        expected: where the search begins; None: at the bound.

    Example:
        >>> largest_that_fits(lambda size: 97 - size, 100)
        97
    """
    first = -(-smallest // multiple_of) - 1
    end = bound // multiple_of + 1
    round_units = math.lcm(_ROUND, multiple_of) // multiple_of

    @cache
    def units_left(units: int) -> float:
        return room(units * multiple_of) / multiple_of

    start = end - 1 if expected is None else round(expected / multiple_of)
    low, high = _bracket(units_left, first, end, start)
    while first < low and high < end:
        # Blocks of a round number of examples leave fewer gaps.
        rounder = (low // round_units + 1) * round_units
        if rounder == high or rounder >= end or units_left(rounder) < 0:
            break
        low, high = _bracket(units_left, rounder, end, rounder + 1)
    return 0 if low == first else low * multiple_of


def _bracket(room: Callable[[int], float], first: int, end: int, middle: int) -> tuple[int, int]:
    """The largest size that fits and the one above it, within ``first`` and ``end``."""
    low, high = first, end
    left = missing = 0.0
    stride, slow = 1, 0
    while high - low > 1:
        middle = min(max(middle, low + 1), high - 1)
        width = high - low
        units = room(middle)
        if units >= 0:
            low, left = middle, units
        else:
            high, missing = middle, -units
        slow = slow + 1 if high - low > width / 2 else 0
        if low == first or high == end:
            # As far as there seems to be room, until something fits and something does not.
            step = math.floor(min(units, width)) or 1
            stride = max(abs(step), stride * 2 if slow > _PATIENCE else stride)
            middle += stride if units >= 0 else -stride
        elif slow > _PATIENCE:
            middle = (low + high) // 2
        else:
            middle = low + int((high - low) * left / (left + missing))
    return low, high
