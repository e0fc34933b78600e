"""The batch sizes that a search may try."""

from __future__ import annotations

from typing import Any, TypeAlias

from batchfinder.errors import UsageError
from batchfinder.units import positive

# The search ends at this size if nothing runs out of memory and no maximum was given: no optimizer
# step uses sixteen million examples.
UNLIMITED_BATCH_SIZE = 2**24

Bounds: TypeAlias = tuple[int, int | None, int]
"""The smallest batch size, the largest or None, and the number that divides each size."""


def whole_bounds(smallest: Any, largest: Any, multiple_of: Any) -> Bounds:
    """Return bounds as plain integers.

    Raises:
        UsageError: one of them is no whole number, or not positive.
    """
    return (
        positive("the minimum batch size", smallest),
        None if largest is None else positive("the maximum batch size", largest),
        positive("multiple_of", multiple_of),
    )


def check_bounds(smallest: int, largest: int | None, multiple_of: int) -> tuple[int, int]:
    """Return the first and the last size that a search may try.

    Args:
        smallest: the smallest size allowed.
        largest: the largest size allowed; None for :data:`UNLIMITED_BATCH_SIZE`.
        multiple_of: every size tried is a multiple of it.

    Returns:
        The smallest and the largest multiple within the bounds.

    Raises:
        UsageError: a bound is no whole number or not positive, the smallest is above the largest,
            or no multiple lies within them.
    """
    smallest, largest, multiple_of = whole_bounds(smallest, largest, multiple_of)
    if largest is not None and smallest > largest:
        raise UsageError(
            f"the smallest batch size, {smallest}, is above the largest, {largest}. "
            f"Try a smallest size of {largest} or less"
        )
    first = -(-smallest // multiple_of) * multiple_of
    last = (largest if largest is not None else max(UNLIMITED_BATCH_SIZE, first)) // multiple_of
    last *= multiple_of
    if first > last:
        raise UsageError(
            f"no multiple of {multiple_of} lies between the smallest batch size {smallest} and "
            f"the largest {largest}. Try another of the three"
        )
    return first, last
