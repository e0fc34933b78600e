"""A simulation of PyTorch's caching allocator for CUDA, under a capacity.

The allocator reserves more memory than tensors request. It gets segments from the device, cuts
them into blocks, and keeps freed blocks for later. It returns whole segments only when the device
is full. Whether a training step fits depends on these rules, not on the sum of its tensors.

Sources: the rules of ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch, and its notes on memory
management (https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management).
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

from batchfinder.probing.devices.allocator.blocks import (
    ADDRESS_BITS,
    ADDRESS_MASK,
    LARGE_SEGMENT_BYTES,
    MIN_BLOCK_BYTES,
    POOL_BYTES,
    SMALL_BYTES,
    Block,
    address_of,
    make_block,
    round_request,
    segment_bytes,
    size_of,
)
from batchfinder.units import MIB

_NO_LIMIT = 1 << ADDRESS_BITS  # more bytes than any block has


class DeviceFullError(Exception):
    """The allocator has returned all that it could, and the request still does not fit.

    Args:
        missing_bytes: the bytes that the device lacks for this request.
    """

    def __init__(self, missing_bytes: float) -> None:
        super().__init__(f"{missing_bytes} bytes are missing")
        self.missing_bytes = missing_bytes


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings of ``PYTORCH_CUDA_ALLOC_CONF`` that change what fits.

    Attributes:
        expandable_segments: use one growing segment per pool instead of many of fixed size.
        max_split_size_bytes: blocks larger than this are not split; None for no limit.
        roundup_power2_divisions: requests are rounded up to this many steps between powers of
            two; 1 for off.

    Example:
        >>> AllocatorSettings(expandable_segments=True).max_split_size_bytes is None
        True
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    roundup_power2_divisions: int = 1

    @classmethod
    def of_this_process(cls) -> AllocatorSettings:
        """Return the settings in the environment."""
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        return cls.of(next(filter(None, map(os.environ.get, names)), ""))

    @classmethod
    def of(cls, text: str) -> AllocatorSettings:
        """Return the settings in a text, read as PyTorch does."""
        parts = (part.partition(":") for part in text.replace(" ", "").split(","))
        told = {name: value for name, _, value in parts}
        numbers = {name: int(value) for name, value in told.items() if value.isdecimal()}
        largest = numbers.get("max_split_size_mb")
        return cls(
            told.get("expandable_segments") == "True",
            None if largest is None else largest * MIB,
            numbers.get("roundup_power2_divisions", 1),
        )


class CachingAllocator:
    """Blocks of memory from a device of a given capacity, by the rules of PyTorch's allocator.

    Args:
        capacity_bytes: the most bytes that it may reserve, as set by
            ``torch.cuda.set_per_process_memory_fraction``.
        settings: the user's settings. ``expandable_segments`` needs
            :class:`~batchfinder.probing.devices.allocator.expandable.ExpandableAllocator`.

    Attributes:
        allocated_bytes: bytes in use now, after rounding; ``torch.cuda.memory_allocated()``.
        reserved_bytes: bytes reserved on the device now; ``torch.cuda.memory_reserved()``.
        peak_allocated_bytes: the most bytes that were in use.
        peak_reserved_bytes: the most bytes that were reserved.
        retries: the number of times that the cache was returned to the device to serve a request.

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
        self, capacity_bytes: float = math.inf, settings: AllocatorSettings | None = None
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        settings = settings or AllocatorSettings()
        self._max_split = settings.max_split_size_bytes or _NO_LIMIT
        self._unsplit = make_block(0, self._max_split)  # larger blocks sort behind it
        self._divisions = settings.roundup_power2_divisions
        self._free: defaultdict[int, list[Block]] = defaultdict(list)  # by pool
        # The free blocks by both their ends. No two share an end: they would be a single block.
        self._edges: dict[int, Block] = {}
        self._segments: dict[int, int] = {}
        self._next: dict[int, int] = {}  # where the next segment begins, by pool

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Return a block of at least ``size`` bytes, above 0. Each stream has pools of its own.

        Raises:
            DeviceFullError: it does not fit, even after all cached segments were returned.
        """
        if self._divisions > 1:
            size = round_request(size, self._divisions)
        else:
            size = -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        pool = 2 * stream + (size > SMALL_BYTES)
        free = self._free[pool]
        index = self._best_fit(free, size)
        block = self._take_from_device(pool, size) if index is None else free.pop(index)
        address, found = block & ADDRESS_MASK, block >> ADDRESS_BITS
        edges = self._edges
        edges.pop(address, None)
        if found > size and self._should_split(size, found - size):
            # The rest, at the higher addresses, becomes a free block.
            rest = found - size << ADDRESS_BITS | address + size
            edges[address + size] = edges[address + found] = rest
            insort(free, rest)
            block = size << ADDRESS_BITS | address
            found = size
        else:
            edges.pop(address + found, None)
        self.allocated_bytes += found
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Return a block to the cache, merged with the free blocks beside it."""
        address, size = block & ADDRESS_MASK, block >> ADDRESS_BITS
        end = address + size
        self.allocated_bytes -= size
        free = self._free[address // POOL_BYTES]
        edges = self._edges
        before = edges.pop(address, None)
        if before is not None:
            del free[bisect_left(free, before)]
            address = before & ADDRESS_MASK
        after = edges.pop(end, None)
        if after is not None:
            del free[bisect_left(free, after)]
            end += after >> ADDRESS_BITS
        block = end - address << ADDRESS_BITS | address
        edges[address] = edges[end] = block
        insort(free, block)

    def release_cached(self) -> None:
        """Return every wholly free segment to the device, as ``torch.cuda.empty_cache`` does."""
        for free in self._free.values():
            for index in reversed(range(len(free))):
                if self._segments.get(address_of(free[index])) == size_of(free[index]):
                    self._release(free, index)

    def _best_fit(self, free: list[Block], size: int) -> int | None:
        """Return the index of the smallest free block that can serve; of equals, the lowest."""
        index = bisect_left(free, size << ADDRESS_BITS)
        if index == len(free):
            return None
        return index if free[index] < self._unsplit or self._may_serve(free[index], size) else None

    def _may_serve(self, unsplit: Block, size: int) -> bool:
        """Return True if a free block that must not be split may serve a request."""
        return size >= self._max_split and size_of(unsplit) < size + LARGE_SEGMENT_BYTES

    def _should_split(self, size: int, rest: int) -> bool:
        return size <= SMALL_BYTES or (rest > SMALL_BYTES and size < self._max_split)

    def _take_from_device(self, pool: int, size: int) -> Block:
        """Return a block of at least ``size`` bytes in new device memory, on no list yet."""
        segment = segment_bytes(size)
        if self._missing(segment) <= 0:
            return self._new_block(pool, size)
        if self._release_unsplit(self._free[pool], size) and self._missing(segment) <= 0:
            return self._new_block(pool, size)
        self.retries += 1
        self.release_cached()
        if self._missing(segment) > 0:
            raise DeviceFullError(self._missing(segment))
        return self._new_block(pool, size)

    def _release_unsplit(self, free: list[Block], size: int) -> bool:
        """Give back segments too large to be split: one that is enough, else the largest ones.

        Returns:
            True if they were enough.
        """
        wanted = max(size, self._max_split)
        index = bisect_left(free, wanted << ADDRESS_BITS)
        if index < len(free):
            self._release(free, index)
            return True
        released = 0
        while free and released < wanted and size_of(free[-1]) >= self._max_split:
            released += size_of(free[-1])
            self._release(free, len(free) - 1)
        return released >= wanted

    def _release(self, free: list[Block], index: int) -> None:
        """Return a segment that is a single free block to the device."""
        block = free.pop(index)
        address, size = address_of(block), size_of(block)
        del self._edges[address], self._edges[address + size], self._segments[address]
        self.reserved_bytes -= size

    def _new_block(self, pool: int, size: int) -> Block:
        segment = segment_bytes(size)
        self._reserve(segment)
        address = self._next.get(pool, pool * POOL_BYTES)
        # Leave a gap to the next segment: blocks of different segments are not neighbors.
        self._next[pool] = address + segment + MIN_BLOCK_BYTES
        self._segments[address] = segment
        return make_block(address, segment)

    def _missing(self, size: int) -> float:
        """Return the bytes missing to reserve a size; 0 or less if it fits."""
        return self.reserved_bytes + size - self.capacity_bytes

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
