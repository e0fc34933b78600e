"""The caching allocator with ``expandable_segments:True``: one growing segment per pool.

Each pool reserves addresses for the whole device once and maps memory into them page by page, so
that a request too large for any gap extends the free block at the end in place of a new segment.

Source: ``ExpandableSegment`` in ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch.
"""

from __future__ import annotations

from batchfinder.simulation.allocator import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    Block,
    CachingAllocator,
    DeviceFullError,
    round_up,
)

# A whole number of pages, and more than any device has; PyTorch reserves 9/8 of the device.
_POOL_ADDRESSES = LARGE_SEGMENT_BYTES << 24


class ExpandableAllocator(CachingAllocator):
    """A :class:`~batchfinder.simulation.allocator.CachingAllocator` with expandable segments.

    Its blocks are contiguous from the pool's first address on; a block is allocated, free (and
    mapped), or unmapped.

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
            page = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
            for key in list(free):
                block = self._block_of(key)
                first = round_up(block.address, page)
                last = (block.address + block.size) // page * page
                if first < last:
                    self._unmap(block, first, last, free)

    def _take_from_device(self, size: int, small: bool) -> Block:
        block = self._map(size, small)
        if block is None:
            self.retries += 1
            self.release_cached()
            block = self._map(size, small)
        if block is None:
            raise DeviceFullError
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        return block.size - size >= MIN_BLOCK_BYTES

    def _map(self, size: int, small: bool) -> Block | None:
        """A free block of ``size``, made by mapping pages; None if the capacity is too small."""
        page = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        hole = self._hole_for(size, small)
        before = hole.previous
        free = self._free_small if small else self._free_large
        has_start = before is not None and not before.allocated
        missing = round_up(size - before.size if before is not None and has_start else size, page)
        if not self._has_room(missing):
            return None
        self._reserve(missing)
        if before is not None and has_start:
            self._remove_free(before, free)
            block = before
        else:
            block = Block(hole.address, 0, small)
            block.previous, block.next = before, hole
            if before is not None:
                before.next = block
            hole.previous = block
        self._shrink_hole(hole, missing)
        block.size += missing
        self._absorb_next(block, free)
        return block

    def _hole_for(self, size: int, small: bool) -> Block:
        """The lowest hole that, with the free block before it, holds ``size`` bytes."""
        holes = self._unmapped[small]
        for address in sorted(holes):
            hole = holes[address]
            before = hole.previous
            start = before.size if before is not None and not before.allocated else 0
            if hole.size + start >= size:
                return hole
        raise DeviceFullError  # the tail is as large as the address space

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
        if before is not None and holes.get(before.address) is before:
            del holes[before.address]
            hole.address, hole.size = before.address, before.size + hole.size
            hole.previous = before.previous
            if hole.previous is not None:
                hole.previous.next = hole
        if after is not None and holes.get(after.address) is after:
            del holes[after.address]
            hole.size += after.size
            hole.next = after.next
            if hole.next is not None:
                hole.next.previous = hole
        holes[hole.address] = hole
