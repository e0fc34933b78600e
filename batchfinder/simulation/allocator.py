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

from batchfinder.simulation.pool import (
    ADDRESS_BITS,
    ADDRESS_MASK,
    Block,
    Pool,
    address_of,
    make_block,
    size_of,
)
from batchfinder.units import MIB

MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
"""Up to here a request is served from the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
"""From here on a request gets a segment of its own size."""
SEGMENT_ROUNDING_BYTES = 2 * MIB

LARGE_POOL_ADDRESS = LARGE_SEGMENT_BYTES << 34
"""Where the addresses of the large pool begin, those of the small pool at 0: more than are ever
used, for addresses of a segment given back are not used again."""


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
        self._small, self._large = self._make_pools()

    def _make_pools(self) -> tuple[Pool, Pool]:
        return (
            Pool(SMALL_SEGMENT_BYTES, MIN_BLOCK_BYTES, None, 0),
            Pool(LARGE_SEGMENT_BYTES, SMALL_BYTES + 1, self._max_split, LARGE_POOL_ADDRESS),
        )

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
        pool = self._small if size <= SMALL_BYTES else self._large
        free = pool.free
        # The smallest block that fits; the lowest of equals.
        index = bisect_left(free, size << ADDRESS_BITS)
        if index < len(free) and (self._max_split is None or self._may_serve(free[index], size)):
            block = free.pop(index)
            address = block & ADDRESS_MASK
            found = block >> ADDRESS_BITS
            del pool.starting[address]
        else:
            block = self._take_from_device(size, pool)
            address = block & ADDRESS_MASK
            found = block >> ADDRESS_BITS
        left = found - size
        if left >= pool.least_rest_bytes and (
            pool.whole_from_bytes is None or size < pool.whole_from_bytes
        ):
            # The rest, at the higher addresses, becomes a free block.
            rest = left << ADDRESS_BITS | address + size
            pool.starting[address + size] = pool.ending[address + found] = rest
            insort(free, rest)
            block = size << ADDRESS_BITS | address
            found = size
        else:
            pool.ending.pop(address + found, None)
        self.allocated_bytes += found
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache, merged with the free blocks beside it."""
        address = block & ADDRESS_MASK
        size = block >> ADDRESS_BITS
        end = address + size
        self.allocated_bytes -= size
        pool = self._small if address < LARGE_POOL_ADDRESS else self._large
        free = pool.free
        before = pool.ending.pop(address, None)
        if before is not None:
            del free[bisect_left(free, before)]
            address = before & ADDRESS_MASK
        after = pool.starting.pop(end, None)
        if after is not None:
            del free[bisect_left(free, after)]
            end += after >> ADDRESS_BITS
        block = end - address << ADDRESS_BITS | address
        pool.starting[address] = pool.ending[end] = block
        insort(free, block)

    def release_cached(self) -> None:
        """Give every wholly free segment back to the device, as ``torch.cuda.empty_cache``."""
        for pool in (self._small, self._large):
            for block in list(pool.free):
                address, size = address_of(block), size_of(block)
                if pool.segments.get(address) == size:
                    pool.remove(block)
                    del pool.segments[address]
                    self.reserved_bytes -= size

    def _may_serve(self, block: Block, size: int) -> bool:
        """Whether a free block is not kept for larger requests, by ``max_split_size``."""
        limit, found = self._max_split, size_of(block)
        if limit is None or size < limit:
            return limit is None or found < limit
        return found < size + LARGE_SEGMENT_BYTES

    def _take_from_device(self, size: int, pool: Pool) -> Block:
        """A block that is on no list yet."""
        segment = segment_bytes(size)
        if not self._has_room(segment):
            self.retries += 1
            self.release_cached()
            if not self._has_room(segment):
                raise DeviceFullError
        address = pool.next_address
        # Apart from the next one: blocks of different segments are no neighbours.
        pool.next_address += segment + MIN_BLOCK_BYTES
        pool.segments[address] = segment
        self._reserve(segment)
        return make_block(address, segment)

    def _has_room(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + size <= self.capacity_bytes

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
