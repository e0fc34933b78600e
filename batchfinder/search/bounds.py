"""The batch sizes that a search may try."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any, NamedTuple

from batchfinder.errors import UsageError
from batchfinder.results.accumulation import divisors
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
        global_batch_size: every size divides it; None if any size may be tried.
    """

    first: int
    last: int
    multiple_of: int
    is_open: bool
    global_batch_size: int | None = None

    @classmethod
    def of(
        cls,
        smallest: Any = 1,
        largest: Any = None,
        multiple_of: Any = 1,
        global_batch_size: Any = None,
    ) -> Bounds:
        """Return the bounds that a user gives.

        Args:
            smallest: the smallest size allowed.
            largest: the largest size allowed; None for no maximum.
            multiple_of: every size is a multiple of it.
            global_batch_size: every size divides it; None if any size may be tried.

        Raises:
            UsageError: a bound is no whole number or not positive, the smallest is above the
                largest, or no such size lies within them.

        Example:
            >>> Bounds.of(5, 30, multiple_of=8)
            Bounds(first=8, last=24, multiple_of=8, is_open=False, global_batch_size=None)
        """
        smallest = positive("the minimum batch size", smallest)
        most = None if largest is None else positive("the maximum batch size", largest)
        multiple_of = positive("multiple_of", multiple_of)
        size = f"multiple of {multiple_of}"
        if global_batch_size is not None:
            total = positive("the global batch size", global_batch_size)
            most = min(most or total, total)
            size = f"divisor of {total}" + (f" that is a {size}" if multiple_of > 1 else "")
        if most is not None and smallest > most:
            raise UsageError(
                f"the smallest batch size, {smallest}, is above the largest, {most}. "
                f"Try a smallest size of {most} or less"
            )
        largest = max(UNLIMITED_BATCH_SIZE, smallest + multiple_of) if most is None else most
        grid = cls(smallest, largest, multiple_of, most is None, global_batch_size)
        first, last = grid.after(smallest - 1), grid.at_most(largest)
        if first > last:
            raise UsageError(
                f"no {size} lies between the smallest batch size {smallest} and "
                f"the largest {most}. Try another of the three"
            )
        return grid._replace(first=first, last=last)

    def at_most(self, size: float) -> int:
        """Return the largest size up to this one, which may be outside the bounds; 0 if none is.

        Example:
            >>> Bounds.of(multiple_of=8).at_most(30), Bounds.of(global_batch_size=96).at_most(30)
            (24, 24)
        """
        if self.global_batch_size is None:
            return math.floor(size / self.multiple_of) * self.multiple_of
        sizes = self._divisors()
        return sizes[place - 1] if (place := bisect_right(sizes, size)) else 0

    def after(self, size: int) -> int:
        """Return the next size, which may be outside the bounds.

        Example:
            >>> Bounds.of(multiple_of=8).after(24), Bounds.of(global_batch_size=96).after(24)
            (32, 32)
        """
        if self.global_batch_size is not None:
            sizes = self._divisors()
            if (place := bisect_right(sizes, size)) < len(sizes):
                return sizes[place]
        return self.multiple_of * (size // self.multiple_of + 1)

    def before(self, size: int) -> int:
        """Return the size before this one, which may be outside the bounds; 0 if none is."""
        return self.at_most(size - 1)

    def steps_between(self, low: int, high: int) -> int:
        """Return how many steps from size to size lead from ``low`` to ``high``."""
        if self.global_batch_size is None:
            return (high - low) // self.multiple_of
        sizes = self._divisors()
        return bisect_right(sizes, high - 1) - bisect_right(sizes, low) + 1

    def without_first(self, least: int | None = None, multiple_of: int = 1) -> Bounds | None:
        """Return the bounds without their first size, and more; None if no size is left.

        Args:
            least: the smallest size to keep; None for the second.
            multiple_of: every size is a multiple of this, too.

        Example:
            >>> Bounds.of(1, 30).without_first(multiple_of=4)
            Bounds(first=4, last=28, multiple_of=4, is_open=False, global_batch_size=None)
        """
        grid = self._replace(multiple_of=math.lcm(self.multiple_of, multiple_of))
        first = grid.after(max(self.first, (least or 1) - 1))
        last = grid.at_most(self.last)
        return grid._replace(first=first, last=last) if first <= last else None

    def powers_of_two(self) -> Bounds | None:
        """Return the bounds of those sizes that are ``multiple_of`` times a power of two.

        None if only divisors may be tried already, or no size is left.

        Example:
            >>> powers = Bounds.of(3, 100).powers_of_two()
            >>> powers.first, powers.after(4), powers.last
            (4, 8, 64)
        """
        if self.global_batch_size is not None:
            return None
        grid = self._replace(global_batch_size=UNLIMITED_BATCH_SIZE * self.multiple_of)
        first, last = grid.after(self.first - 1), grid.at_most(self.last)
        return grid._replace(first=first, last=last) if first <= last else None

    def _divisors(self) -> tuple[int, ...]:
        assert self.global_batch_size is not None
        return divisors(self.global_batch_size, self.multiple_of, up_to=UNLIMITED_BATCH_SIZE)


ALL_SIZES = Bounds.of()
