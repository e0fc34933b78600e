"""The caching allocator with ``expandable_segments:True``: one growing segment per pool.

Each pool reserves addresses for the whole device once and maps memory into them page by page, so
that a request too large for any gap extends the free block at the end in place of a new segment.

Source: ``ExpandableSegment`` in ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch.
"""

from __future__ import annotations

from batchfinder.simulation.allocator import (
    LARGE_POOL_ADDRESS,
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    CachingAllocator,
    DeviceFullError,
    round_up,
)
from batchfinder.simulation.pool import Block, Pool, address_of, make_block, size_of


class ExpandableAllocator(CachingAllocator):
    """A :class:`~batchfinder.simulation.allocator.CachingAllocator` with expandable segments.

    The addresses of a pool are in use, free (and mapped), or unmapped.

    Args:
        capacity_bytes: what may be reserved at most; None: no limit.
        settings: ``expandable_segments`` is taken for granted.

    Example:
        >>> allocator = ExpandableAllocator(capacity_bytes=40 * 2**20)
        >>> first = allocator.malloc(15 * 2**20)
        >>> second = allocator.malloc(15 * 2**20)
        >>> allocator.reserved_bytes // 2**20
        40
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
    ) -> None:
        super().__init__(capacity_bytes, settings)
        # The size of each unmapped stretch of a pool, by its address. The last one is the endless
        # tail; PyTorch reserves 9/8 of the device.
        self._holes = {
            pool: {pool.next_address: LARGE_POOL_ADDRESS} for pool in (self._small, self._large)
        }

    def _make_pools(self) -> tuple[Pool, Pool]:
        return (
            Pool(SMALL_SEGMENT_BYTES, MIN_BLOCK_BYTES, None, 0),
            Pool(LARGE_SEGMENT_BYTES, MIN_BLOCK_BYTES, None, LARGE_POOL_ADDRESS),
        )

    def release_cached(self) -> None:
        """Unmap every page that is wholly free."""
        for pool in (self._small, self._large):
            for block in list(pool.free):
                start, end = address_of(block), address_of(block) + size_of(block)
                first = round_up(start, pool.page_bytes)
                last = end // pool.page_bytes * pool.page_bytes
                if first < last:
                    pool.remove(block)
                    if start < first:
                        pool.add(make_block(start, first - start))
                    if last < end:
                        pool.add(make_block(last, end - last))
                    self.reserved_bytes -= last - first
                    _add_hole(self._holes[pool], first, last)

    def _take_from_device(self, size: int, pool: Pool) -> Block:
        block = self._map(size, pool)
        if block is None:
            self.retries += 1
            self.release_cached()
            block = self._map(size, pool)
        if block is None:
            raise DeviceFullError
        return block

    def _map(self, size: int, pool: Pool) -> Block | None:
        """A block of ``size``, made by mapping pages; None if the capacity is too small.

        It goes as far as there is no gap, and is on no list.
        """
        holes = self._holes[pool]
        hole, before = self._hole_for(size, pool)
        missing = round_up(size - (size_of(before) if before else 0), pool.page_bytes)
        if not self._has_room(missing):
            return None
        self._reserve(missing)
        start, end = hole, hole + missing
        if before is not None:
            pool.remove(before)
            start = address_of(before)
        left = holes.pop(hole) - missing
        if left:
            holes[end] = left
        after = pool.starting.get(end)
        if after is not None:
            pool.remove(after)
            end += size_of(after)
        return make_block(start, end - start)

    def _hole_for(self, size: int, pool: Pool) -> tuple[int, Block | None]:
        """The lowest hole that, with the free block before it, holds ``size`` bytes; and that."""
        holes = self._holes[pool]
        for address in sorted(holes):
            before = pool.ending.get(address)
            if holes[address] + (size_of(before) if before else 0) >= size:
                return address, before
        raise DeviceFullError  # the tail is as large as the address space


def _add_hole(holes: dict[int, int], first: int, last: int) -> None:
    """Note an unmapped stretch, merged with those beside it."""
    before = next((start for start, size in holes.items() if start + size == first), first)
    holes[before] = last + holes.pop(last, 0) - before
