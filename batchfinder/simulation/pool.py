"""The free blocks of one of the caching allocator's pools."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TypeAlias

Block: TypeAlias = int
"""A piece of a segment: its size in the high bits, its address in the low ones.

As an integer it is its own key in a list sorted by size, then address; an object for each of the
thousands of blocks of a step would take most of the time of a replay.
"""
ADDRESS_BITS = 62
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1


def make_block(address: int, size: int) -> Block:
    """The block at an address.

    Example:
        >>> block = make_block(address=1024, size=512)
        >>> address_of(block), size_of(block)
        (1024, 512)
    """
    return size << ADDRESS_BITS | address


def address_of(block: Block) -> int:
    """Where a block begins."""
    return block & ADDRESS_MASK


def size_of(block: Block) -> int:
    """The bytes of a block."""
    return block >> ADDRESS_BITS


class Pool:
    """The free blocks of one pool.

    Args:
        page_bytes: of its ordinary segments.
        least_rest_bytes: a block is split if this much or more is left over.
        whole_from_bytes: requests of this size or more get whole blocks; None: no limit.
        first_address: of its segments.

    Attributes:
        free: the free blocks, from small to large and, of one size, from low to high.
        starting: the same by their first address.
        ending: the same by the address after their last.
        segments: the size of each segment, by its address.
        next_address: of the next segment.
    """

    __slots__ = (
        "ending",
        "free",
        "least_rest_bytes",
        "next_address",
        "page_bytes",
        "segments",
        "starting",
        "whole_from_bytes",
    )

    def __init__(
        self,
        page_bytes: int,
        least_rest_bytes: int,
        whole_from_bytes: int | None,
        first_address: int,
    ) -> None:
        self.page_bytes = page_bytes
        self.least_rest_bytes = least_rest_bytes
        self.whole_from_bytes = whole_from_bytes
        self.next_address = first_address
        self.free: list[Block] = []
        self.starting: dict[int, Block] = {}
        self.ending: dict[int, Block] = {}
        self.segments: dict[int, int] = {}

    def add(self, block: Block) -> None:
        """Note a free block that has no free neighbour."""
        address = block & ADDRESS_MASK
        self.starting[address] = self.ending[address + (block >> ADDRESS_BITS)] = block
        insort(self.free, block)

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        address = block & ADDRESS_MASK
        del self.starting[address]
        del self.ending[address + (block >> ADDRESS_BITS)]
        del self.free[bisect_left(self.free, block)]
