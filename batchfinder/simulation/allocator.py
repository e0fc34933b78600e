"""PyTorch's caching allocator for CUDA, on paper and under a capacity.

What an allocator takes from the device is not what tensors ask for: it takes segments, cuts them
into blocks, keeps freed blocks for later, and gives whole segments back only when the device is
full. Whether a training step fits is decided here, not by the sum of its tensors.

Sources: the constants and rules of ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch, and its notes
on memory management (https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from batchfinder.units import MIB

MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
"""Up to here a request is served from the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
"""From here on a request gets a segment of its own size."""
SEGMENT_ROUNDING_BYTES = 2 * MIB

# Free blocks are kept sorted by size, then address: as one integer, faster than as a tuple.
_ADDRESS_BITS = 52
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1


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


def round_up(size: int, multiple: int) -> int:
    """The next multiple of ``multiple`` that is not below ``size``."""
    return -(-size // multiple) * multiple


def round_request(size: int, power2_divisions: int = 1) -> int:
    """The block size that serves a request of ``size`` bytes.

    Args:
        size: bytes asked for, positive.
        power2_divisions: see :class:`AllocatorSettings`.

    Example:
        >>> round_request(1), round_request(513), round_request(1200 * 1024, power2_divisions=4)
        (512, 1024, 1310720)
    """
    if size <= MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    if power2_divisions > 1 and size > MIN_BLOCK_BYTES * power2_divisions:
        floor = 1 << (size.bit_length() - 1)
        return size if size == floor else round_up(size, max(1, floor // power2_divisions))
    return -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def segment_bytes(block_size: int) -> int:
    """The size of the segment taken from the device to serve a rounded request.

    Example:
        >>> [segment_bytes(size) // MIB for size in (512, 2 * MIB, 11 * MIB)]
        [2, 20, 12]
    """
    if block_size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_size < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(block_size, SEGMENT_ROUNDING_BYTES)


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
        capacity_bytes: what may be reserved at most; None: no limit.
        settings: what the user set; ``expandable_segments`` is for
            :class:`~batchfinder.simulation.expandable.ExpandableAllocator`.

    Attributes:
        allocated_bytes: in use now, after rounding; ``torch.cuda.memory_allocated()``.
        reserved_bytes: taken from the device now; ``torch.cuda.memory_reserved()``.
        peak_allocated_bytes: the most that was in use.
        peak_reserved_bytes: the most that was reserved.
        retries: how often the cache had to be given back to serve a request.

    Example:
        >>> allocator = CachingAllocator(capacity_bytes=24 * MIB)
        >>> block = allocator.malloc(3 * MIB)
        >>> allocator.reserved_bytes // MIB, allocator.allocated_bytes // MIB
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
        free = self._free_small if block.small else self._free_large
        before = block.previous
        if before is not None and not before.allocated:
            self._remove_free(before, free)
            block.address = before.address
            block.size += before.size
            block.previous = before.previous
            if before.previous is not None:
                before.previous.next = block
        self._absorb_next(block, free)
        self._add_free(block, free)

    def _absorb_next(self, block: Block, free: list[int]) -> None:
        """Make one block of this one and of the one after it, if that is free."""
        after = block.next
        if after is not None and not after.allocated:
            self._remove_free(after, free)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block

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
        index = bisect_left(free, size << _ADDRESS_BITS)
        if index == len(free):
            return None
        found = free[index] >> _ADDRESS_BITS
        limit = self._max_split
        if limit is not None and (
            (size < limit <= found) or (size >= limit and found >= size + LARGE_SEGMENT_BYTES)
        ):
            return None
        return self._free_blocks.pop(free.pop(index) & _ADDRESS_MASK)

    def _take_from_device(self, size: int, small: bool) -> Block:
        segment = segment_bytes(size)
        if not self._has_room(segment):
            self.retries += 1
            self.release_cached()
            if not self._has_room(segment):
                raise DeviceFullError
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
        insort(free, block.size << _ADDRESS_BITS | block.address)
        self._free_blocks[block.address] = block

    def _remove_free(self, block: Block, free: list[int]) -> None:
        del free[bisect_left(free, block.size << _ADDRESS_BITS | block.address)]
        del self._free_blocks[block.address]
