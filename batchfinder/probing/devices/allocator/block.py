"""Blocks of the simulated allocator, and the addresses of its pools.

Stream ``s`` has two pools: number ``2 * s`` for small requests, and ``2 * s + 1`` for large ones.
"""

from __future__ import annotations

from typing import TypeAlias

from batchfinder.probing.devices.allocator.rounding import LARGE_SEGMENT_BYTES

Block: TypeAlias = int
"""A piece of a segment: its size in the high bits, its address in the low bits.

So a list of blocks is sorted by size, then address. Objects that refer to their neighbors would
dominate the time of a replay: the garbage collector would inspect thousands of reference cycles.
"""
ADDRESS_BITS = 60
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1

POOL_BYTES = LARGE_SEGMENT_BYTES << 24
"""The addresses of a pool. Pool ``p`` begins at ``p * POOL_BYTES``.

It is a whole number of segments, and more than are ever used: a returned segment's addresses are
not used again.
"""


def make_block(address: int, size: int) -> Block:
    """Return the block at an address.

    Example:
        >>> block = make_block(1024, size=512)
        >>> address_of(block), size_of(block)
        (1024, 512)
    """
    return size << ADDRESS_BITS | address


def address_of(block: Block) -> int:
    """Return the address at which a block begins."""
    return block & ADDRESS_MASK


def size_of(block: Block) -> int:
    """Return the bytes of a block."""
    return block >> ADDRESS_BITS
