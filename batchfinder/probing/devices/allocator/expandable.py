"""The caching allocator with ``expandable_segments:True``: one growing segment per pool.

Each pool reserves addresses for the whole device once, and maps memory into them page by page. If
a request is too large for any gap, the free block at the end grows; there is no new segment.

Source: ``ExpandableSegment`` in ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from batchfinder.probing.devices.allocator.blocks import (
    ADDRESS_BITS,
    LARGE_SEGMENT_BYTES,
    POOL_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    address_of,
    make_block,
    round_up,
    size_of,
)
from batchfinder.probing.devices.allocator.caching import (
    AllocatorSettings,
    CachingAllocator,
    DeviceFullError,
)


class ExpandableAllocator(CachingAllocator):
    """A ``CachingAllocator`` with expandable segments.

    Each address of a pool is in use, free (and mapped), or unmapped. Unmapped ranges are holes.

    Args:
        capacity_bytes: a request that the cache cannot serve has to fit below this as a whole,
            even if a part of it is mapped already. Memory is mapped by whole pages, so a little
            more than this may be reserved.
        settings: the user's settings. ``expandable_segments`` is assumed to be True.

    Example:
        >>> allocator = ExpandableAllocator(capacity_bytes=40 * 2**20)
        >>> first = allocator.malloc(15 * 2**20)
        >>> second = allocator.malloc(15 * 2**20)
        >>> allocator.reserved_bytes // 2**20
        40
    """

    def __init__(
        self, capacity_bytes: float = math.inf, settings: AllocatorSettings | None = None
    ) -> None:
        super().__init__(capacity_bytes, settings)
        # The size of each hole, by its address, by pool. The last hole of a pool is its endless
        # tail, where PyTorch reserves 9/8 of the device.
        self._holes: dict[int, dict[int, int]] = {}

    def release_cached(self) -> None:
        """Unmap every page that is wholly free."""
        for pool, free in self._free.items():
            page, holes = _page(pool), self._holes_of(pool)
            for block in list(free):
                start, end = address_of(block), address_of(block) + size_of(block)
                first, last = round_up(start, page), end // page * page
                if first < last:
                    del free[bisect_left(free, block)], self._edges[start], self._edges[end]
                    for address, size in ((start, first - start), (last, end - last)):
                        if size:
                            self._add_free(make_block(address, size))
                    self.reserved_bytes -= last - first
                    _add_hole(holes, first, last)

    def _best_fit(self, free: list[Block], size: int) -> int | None:
        """Return the index of the best free block; one that can grow counts at its grown size.

        So the block at the end is not used if a gap is large enough.
        """
        index = bisect_left(free, size << ADDRESS_BITS)
        if index == len(free):
            return None
        reach = self._reach(free[index])
        while index + 1 < len(free) and (further := self._reach(free[index + 1])) < reach:
            index, reach = index + 1, further
        return index if free[index] < self._unsplit or self._may_serve(free[index], size) else None

    def _reach(self, block: Block) -> int:
        """Return the size of a free block together with the hole behind it."""
        holes = self._holes_of(address_of(block) // POOL_BYTES)
        return size_of(block) + holes.get(address_of(block) + size_of(block), 0)

    def _should_split(self, size: int, rest: int) -> bool:
        return True

    def _release_unsplit(self, free: list[Block], size: int) -> bool:
        return False  # every segment can be split

    def _new_block(self, pool: int, size: int) -> Block:
        """Return a block of at least ``size`` bytes, by mapping pages beside free blocks."""
        page, holes, free = _page(pool), self._holes_of(pool), self._free[pool]
        address = self._lowest_room(holes, size)
        while (found := self._free_from(address)) < size:
            hole = address + found
            length = holes.pop(hole)
            mapped = round_up(min(size - found, length), page)
            if mapped < length:
                holes[hole + mapped] = length - mapped
            self._reserve(mapped)
            self._add_free(make_block(hole, mapped))
        block = make_block(address, found)
        del free[bisect_left(free, block)]
        return block

    def _lowest_room(self, holes: dict[int, int], size: int) -> int:
        """Return the lowest address where adjacent free blocks and holes hold ``size`` bytes."""
        for hole in sorted(holes):
            before = self._edges.get(hole)
            first = end = hole if before is None else address_of(before)
            while part := self._free_from(end) or holes.get(end):
                end += part
                if end - first >= size:
                    return first
        raise DeviceFullError(size)  # the tail is as large as the address space

    def _holes_of(self, pool: int) -> dict[int, int]:
        return self._holes.setdefault(pool, {pool * POOL_BYTES: POOL_BYTES})

    def _add_free(self, block: Block) -> None:
        """Make a free block from addresses that were neither free nor in use."""
        self.allocated_bytes += size_of(block)
        self.free(block)

    def _free_from(self, address: int) -> int:
        """Return the size of the free block that begins at an address; 0 if there is none."""
        block = self._edges.get(address)
        return size_of(block) if block is not None and address_of(block) == address else 0


def allocator_of(capacity_bytes: float, settings: AllocatorSettings) -> CachingAllocator:
    """Return a fresh allocator of the kind that the settings choose."""
    kind = ExpandableAllocator if settings.expandable_segments else CachingAllocator
    return kind(capacity_bytes, settings)


def _page(pool: int) -> int:
    return LARGE_SEGMENT_BYTES if pool % 2 else SMALL_SEGMENT_BYTES


def _add_hole(holes: dict[int, int], first: int, last: int) -> None:
    """Note an unmapped range, merged with the ranges beside it."""
    before = next((start for start, size in holes.items() if start + size == first), first)
    holes[before] = last + holes.pop(last, 0) - before
