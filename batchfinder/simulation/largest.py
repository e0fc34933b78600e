"""A search for the largest size that fits in a simulation, where each try costs milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

# Tries in a row that may fail to halve the interval before their reported room is distrusted.
_PATIENCE = 2

# Multiples of this often fit where a slightly smaller size does not: they leave fewer gaps.
_ROUND = 8


def largest_that_fits(
    room: Callable[[int], float],
    bound: int,
    *,
    smallest: int = 1,
    multiple_of: int = 1,
    expected: float | None = None,
) -> int:
    """Return the largest size that fits; 0 if the smallest does not.

    The next size above the answer does not fit or is out of bounds, and neither does the next
    multiple of 8. A larger size may still fit because its tensors happen to leave fewer gaps.

    Args:
        room: maps a size to roughly how many more examples fit; below 0, how many do not fit.
        bound: an upper bound of the answer. A trace's bound ignores only fragmentation, so the
            answer should be a few percent below.
        smallest: the smallest size to try.
        multiple_of: only multiples of this are tried.
        expected: the first size to try. Default: the bound.

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
        rounder = (low // round_units + 1) * round_units
        if rounder == high or rounder >= end or units_left(rounder) < 0:
            break
        low, high = _bracket(units_left, rounder, end, rounder + 1)
    return 0 if low == first else low * multiple_of


def _bracket(room: Callable[[int], float], first: int, end: int, middle: int) -> tuple[int, int]:
    """Return the largest size that fits and the next one, between ``first`` and ``end``."""
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
            # Move as far as there seems to be room, until one size fits and another does not.
            step = math.floor(min(units, width)) or 1
            stride = max(abs(step), stride * 2 if slow > _PATIENCE else stride)
            middle += stride if units >= 0 else -stride
        elif slow > _PATIENCE:
            middle = (low + high) // 2
        else:
            middle = low + int((high - low) * left / (left + missing))
    return low, high
