"""The caching allocator with ``expandable_segments:True``: one growing segment per pool.

Each pool reserves addresses for the whole device once and maps memory into them page by page, so
that a request too large for any gap extends the free block at the end in place of a new segment.

Source: ``ExpandableSegment`` in ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch.
"""

from __future__ import annotations

from bisect import bisect_left

from batchfinder.simulation.allocator import (
    ADDRESS_BITS,
    AllocatorSettings,
    Block,
    CachingAllocator,
    DeviceFullError,
)
from batchfinder.simulation.rounding import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    round_up,
)

# A whole number of pages, and more than any device has; PyTorch reserves 9/8 of the device.
_POOL_ADDRESSES = LARGE_SEGMENT_BYTES << 24


class ExpandableAllocator(CachingAllocator):
    """A :class:`~batchfinder.simulation.allocator.CachingAllocator` with expandable segments.

    Its blocks are contiguous from the pool's first address on; a block is allocated, free (and
    mapped), or unmapped.

    Args:
        capacity_bytes: a request that is no longer served from the cache has to fit below it as
            a whole, though a part of it may be mapped already. As memory is mapped by whole pages,
            a little more than this may be reserved. None: no limit.
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
        # The holes of each pool, by address. The last one is the endless tail.
        self._unmapped: dict[bool, dict[int, Block]] = {}
        for small in (True, False):
            start = 0 if small else _POOL_ADDRESSES
            tail = Block(start, _POOL_ADDRESSES, small)
            tail.allocated = True  # never merged with a free block, which is mapped
            self._unmapped[small] = {start: tail}

    def release_cached(self) -> None:
        """Unmap every page that is wholly free."""
        for small, free in ((True, self._free_small), (False, self._free_large)):
            page = _page_bytes(small)
            for key in list(free):
                block = self._block_of(key)
                first = round_up(block.address, page)
                last = (block.address + block.size) // page * page
                if first < last:
                    self._unmap(block, first, last, free)

    def _best_fit(self, size: int, small: bool) -> Block | None:
        """As without expandable segments, but a block that can grow counts as what it can become.

        So the block at the end is left alone while a gap will do.
        """
        free = self._free_small if small else self._free_large
        index = bisect_left(free, size << ADDRESS_BITS)
        if index == len(free):
            return None
        while index + 1 < len(free) and self._reach(free[index + 1]) < self._reach(free[index]):
            index += 1
        block = self._block_of(free[index])
        if self._is_oversized(block.size, size):
            return None
        self._remove_free(block, free)
        return block

    def _reach(self, key: int) -> int:
        """The size of a free block together with the hole behind it."""
        block = self._block_of(key)
        after = block.next
        return block.size + (after.size if after is not None and self._is_hole(after) else 0)

    def _is_hole(self, block: Block) -> bool:
        return self._unmapped[block.small].get(block.address) is block

    def _should_split(self, block: Block, size: int) -> bool:
        return block.size - size >= MIN_BLOCK_BYTES

    def _release_unsplit(self, size: int, small: bool) -> bool:
        return False  # every segment can be split

    def _new_block(self, size: int, small: bool) -> Block:
        """A block of at least ``size`` bytes, made by mapping pages beside what is free."""
        page = _page_bytes(small)
        free = self._free_small if small else self._free_large
        block = self._lowest_room(size, small)
        while self._is_hole(block) or block.size < size:
            hole = block if self._is_hole(block) else block.next
            assert hole is not None
            missing = size if hole is block else size - block.size
            block = self._map(hole, round_up(min(missing, hole.size), page), free)
        self._remove_free(block, free)
        return block

    def _lowest_room(self, size: int, small: bool) -> Block:
        """The first of the lowest free blocks and holes in a row that hold ``size`` bytes."""
        holes = self._unmapped[small]
        for address in sorted(holes):
            first = holes[address]
            if first.previous is not None and not first.previous.allocated:
                first = first.previous
            room, block = 0, first
            while not block.allocated or self._is_hole(block):
                room += block.size
                if room >= size:
                    return first
                if block.next is None:
                    break
                block = block.next
        raise DeviceFullError  # the tail is as large as the address space

    def _map(self, hole: Block, size: int, free: list[int]) -> Block:
        """Make the first bytes of a hole a free block, merged with the free blocks beside it."""
        self._reserve(size)
        block = Block(hole.address, size, hole.small)
        block.previous, block.next = hole.previous, hole
        if hole.previous is not None:
            hole.previous.next = block
        hole.previous = block
        self._shrink_hole(hole, size)
        self._merge_into(free, block)
        return block

    def _shrink_hole(self, hole: Block, mapped: int) -> None:
        """Take the first bytes of a hole away; an empty hole disappears."""
        holes = self._unmapped[hole.small]
        del holes[hole.address]
        hole.address += mapped
        hole.size -= mapped
        if hole.size:
            holes[hole.address] = hole
            return
        assert hole.previous is not None
        hole.previous.next = hole.next
        if hole.next is not None:
            hole.next.previous = hole.previous

    def _unmap(self, block: Block, first: int, last: int, free: list[int]) -> None:
        """Turn the addresses from ``first`` to ``last`` of a free block into a hole."""
        self._remove_free(block, free)
        self.reserved_bytes -= last - first
        before, after = block.previous, block.next
        end = block.address + block.size
        hole = Block(first, last - first, block.small)
        hole.allocated = True
        pieces = []
        if block.address < first:
            block.size = first - block.address
            pieces.append(block)
        pieces.append(hole)
        if last < end:
            pieces.append(Block(last, end - last, block.small))
        for piece in pieces:
            piece.previous = before
            if before is not None:
                before.next = piece
            before = piece
            if piece is not hole:
                self._add_free(piece, free)
        pieces[-1].next = after
        if after is not None:
            after.previous = pieces[-1]
        self._merge_holes(hole)

    def _merge_holes(self, hole: Block) -> None:
        holes = self._unmapped[hole.small]
        before, after = hole.previous, hole.next
        if before is not None and self._is_hole(before):
            del holes[before.address]
            hole.address, hole.size = before.address, before.size + hole.size
            hole.previous = before.previous
            if hole.previous is not None:
                hole.previous.next = hole
        if after is not None and self._is_hole(after):
            del holes[after.address]
            hole.size += after.size
            hole.next = after.next
            if hole.next is not None:
                hole.next.previous = hole
        holes[hole.address] = hole


def _page_bytes(small: bool) -> int:
    return SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
