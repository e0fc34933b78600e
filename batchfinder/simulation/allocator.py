"""PyTorch's caching allocator for CUDA, on paper and under a capacity.

What an allocator takes from the device is not what tensors ask for: it takes segments, cuts them
into blocks, keeps freed blocks for later, and gives whole segments back only when the device is
full. Whether a training step fits is decided here, not by the sum of its tensors.

Sources: the rules of ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch, and its notes on memory
management (https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from batchfinder.simulation.rounding import (
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    round_request,
    segment_bytes,
)

# Free blocks are kept sorted by size, then address: as one integer, faster than as a tuple.
ADDRESS_BITS = 52
_ADDRESS_MASK = (1 << ADDRESS_BITS) - 1


class DeviceFullError(Exception):
    """The allocator has given back all it could, and the request still does not fit."""


@dataclass(frozen=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` can change.

    Attributes:
        expandable_segments: one growing segment per pool in place of many of fixed size.
        max_split_size_bytes: blocks larger than this are not split; None: no limit.
        roundup_power2_divisions: requests are rounded up to this many steps between powers of
            two; 1: off.

    Example:
        >>> AllocatorSettings(expandable_segments=True).max_split_size_bytes is None
        True
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    roundup_power2_divisions: int = 1


class Block:
    """A piece of a segment, in use or free; its neighbours are pieces of the same segment."""

    __slots__ = ("address", "allocated", "next", "previous", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.allocated = False
        self.previous: Block | None = None
        self.next: Block | None = None


class CachingAllocator:
    """Blocks of memory from a device of a given capacity, by the rules of PyTorch's allocator.

    Args:
        capacity_bytes: what may be reserved at most, as set by
            ``torch.cuda.set_per_process_memory_fraction``; None: no limit.
        settings: what the user set; ``expandable_segments`` is for
            :class:`~batchfinder.simulation.expandable.ExpandableAllocator`.

    Attributes:
        allocated_bytes: in use now, after rounding; ``torch.cuda.memory_allocated()``.
        reserved_bytes: taken from the device now; ``torch.cuda.memory_reserved()``.
        peak_allocated_bytes: the most that was in use.
        peak_reserved_bytes: the most that was reserved.
        retries: how often the cache had to be given back to serve a request.

    Example:
        >>> allocator = CachingAllocator(capacity_bytes=24 * 2**20)
        >>> block = allocator.malloc(3 * 2**20)
        >>> allocator.reserved_bytes // 2**20, allocator.allocated_bytes // 2**20
        (20, 3)
        >>> allocator.free(block)
        >>> allocator.release_cached()
        >>> allocator.reserved_bytes
        0
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.retries = 0
        settings = settings or AllocatorSettings()
        self._max_split = settings.max_split_size_bytes
        self._divisions = settings.roundup_power2_divisions
        self._free_small: list[int] = []
        self._free_large: list[int] = []
        self._free_blocks: dict[int, Block] = {}
        self._next_address = 0

    def malloc(self, size: int) -> Block:
        """A block of at least ``size`` bytes.

        Args:
            size: positive.

        Raises:
            DeviceFullError: no room, even after all cached segments were given back.
        """
        if self._divisions > 1:
            size = round_request(size, self._divisions)
        else:
            size = -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        small = size <= SMALL_BYTES
        block = self._best_fit(size, small) or self._take_from_device(size, small)
        if self._should_split(block, size):
            self._split(block, size)
        block.allocated = True
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache, merged with the free blocks beside it."""
        block.allocated = False
        self.allocated_bytes -= block.size
        self._merge_into(self._free_small if block.small else self._free_large, block)

    def _merge_into(self, free: list[int], block: Block) -> None:
        """Make one free block of this one and of the free ones beside it."""
        before = block.previous
        if before is not None and not before.allocated:
            self._remove_free(before, free)
            block.address = before.address
            block.size += before.size
            block.previous = before.previous
            if before.previous is not None:
                before.previous.next = block
        after = block.next
        if after is not None and not after.allocated:
            self._remove_free(after, free)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block
        self._add_free(block, free)

    def release_cached(self) -> None:
        """Give every wholly free segment back to the device, as ``torch.cuda.empty_cache``."""
        for free in (self._free_small, self._free_large):
            kept = []
            for key in free:
                block = self._block_of(key)
                if block.previous is None and block.next is None:
                    del self._free_blocks[block.address]
                    self.reserved_bytes -= block.size
                else:
                    kept.append(key)
            free[:] = kept

    def _block_of(self, key: int) -> Block:
        return self._free_blocks[key & _ADDRESS_MASK]

    def _best_fit(self, size: int, small: bool) -> Block | None:
        free = self._free_small if small else self._free_large
        index = bisect_left(free, size << ADDRESS_BITS)
        if index == len(free):
            return None
        if self._is_oversized(free[index] >> ADDRESS_BITS, size):
            return None
        return self._free_blocks.pop(free.pop(index) & _ADDRESS_MASK)

    def _is_oversized(self, found: int, size: int) -> bool:
        """Whether a free block is too large to be spent on a request."""
        limit = self._max_split
        if limit is None:
            return False
        return found >= (limit if size < limit else size + LARGE_SEGMENT_BYTES)

    def _take_from_device(self, size: int, small: bool) -> Block:
        segment = segment_bytes(size)
        if self._has_room(segment):
            return self._new_block(size, small)
        if self._release_unsplit(size, small) and self._has_room(segment):
            return self._new_block(size, small)
        self.retries += 1
        self.release_cached()
        if not self._has_room(segment):
            raise DeviceFullError
        return self._new_block(size, small)

    def _release_unsplit(self, size: int, small: bool) -> bool:
        """Give back segments too large to be split: one that is enough, else the largest.

        Returns:
            Whether they were enough.
        """
        if self._max_split is None:
            return False
        free = self._free_small if small else self._free_large
        wanted = max(size, self._max_split)
        index = bisect_left(free, wanted << ADDRESS_BITS)
        if index < len(free):
            self._release(free, index)
            return True
        released = 0
        while free and released < wanted and free[-1] >> ADDRESS_BITS >= self._max_split:
            released += free[-1] >> ADDRESS_BITS
            self._release(free, len(free) - 1)
        return released >= wanted

    def _release(self, free: list[int], index: int) -> None:
        block = self._free_blocks.pop(free.pop(index) & _ADDRESS_MASK)
        self.reserved_bytes -= block.size

    def _new_block(self, size: int, small: bool) -> Block:
        """A block of at least ``size`` bytes in memory new from the device."""
        segment = segment_bytes(size)
        block = Block(self._next_address, segment, small)
        self._next_address += segment
        self._reserve(segment)
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.small:
            return rest >= MIN_BLOCK_BYTES
        return rest > SMALL_BYTES and (self._max_split is None or size < self._max_split)

    def _split(self, block: Block, size: int) -> None:
        """Cut a block to ``size``; the rest, at the higher addresses, becomes a free block."""
        rest = Block(block.address + size, block.size - size, block.small)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.size = size
        self._add_free(rest, self._free_small if block.small else self._free_large)

    def _has_room(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + size <= self.capacity_bytes

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def _add_free(self, block: Block, free: list[int]) -> None:
        insort(free, block.size << ADDRESS_BITS | block.address)
        self._free_blocks[block.address] = block

    def _remove_free(self, block: Block, free: list[int]) -> None:
        del free[bisect_left(free, block.size << ADDRESS_BITS | block.address)]
        del self._free_blocks[block.address]
