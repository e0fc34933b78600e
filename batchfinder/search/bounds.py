"""The batch sizes that a search may try."""

from __future__ import annotations

from typing import Any, NamedTuple

from batchfinder.errors import UsageError
from batchfinder.units import positive

# The search ends at this size if nothing runs out of memory and no maximum was given: no optimizer
# step uses sixteen million examples.
UNLIMITED_BATCH_SIZE = 2**24


class Bounds(NamedTuple):
    """The batch sizes that a search may try. Make them by :meth:`of`.

    Attributes:
        first: the smallest size.
        last: the largest size.
        multiple_of: every size is a multiple of it, ``first`` and ``last`` too.
        is_open: True if no maximum was given, so that ``last`` is :data:`UNLIMITED_BATCH_SIZE`.
    """

    first: int
    last: int
    multiple_of: int
    is_open: bool

    @classmethod
    def of(cls, smallest: Any = 1, largest: Any = None, multiple_of: Any = 1) -> Bounds:
        """Return the bounds that a user gives.

        Args:
            smallest: the smallest size allowed.
            largest: the largest size allowed; None for no maximum.
            multiple_of: every size is a multiple of it.

        Raises:
            UsageError: a bound is no whole number or not positive, the smallest is above the
                largest, or no multiple lies within them.

        Example:
            >>> Bounds.of(5, 30, multiple_of=8)
            Bounds(first=8, last=24, multiple_of=8, is_open=False)
        """
        smallest = positive("the minimum batch size", smallest)
        most = None if largest is None else positive("the maximum batch size", largest)
        multiple_of = positive("multiple_of", multiple_of)
        if most is not None and smallest > most:
            raise UsageError(
                f"the smallest batch size, {smallest}, is above the largest, {most}. "
                f"Try a smallest size of {most} or less"
            )
        first = -(-smallest // multiple_of) * multiple_of
        last = (max(UNLIMITED_BATCH_SIZE, first) if most is None else most) // multiple_of
        last *= multiple_of
        if first > last:
            raise UsageError(
                f"no multiple of {multiple_of} lies between the smallest batch size {smallest} and "
                f"the largest {most}. Try another of the three"
            )
        return cls(first, last, multiple_of, most is None)

    def without_first(self) -> Bounds | None:
        """Return the bounds without their first size; None if that is their only one."""
        first = self.first + self.multiple_of
        return self._replace(first=first) if first <= self.last else None


ALL_SIZES = Bounds.of()
