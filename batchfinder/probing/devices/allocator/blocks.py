"""Blocks of PyTorch's caching allocator: how requests are rounded to them, and where they are.

Stream ``s`` has two pools: number ``2 * s`` for small requests, and ``2 * s + 1`` for large ones.

Source: the constants and rules of ``c10/core/AllocatorConfig.h`` and
``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch.
"""

from __future__ import annotations

from typing import TypeAlias

from batchfinder.units import MIB

MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
"""The largest request, in bytes, that the small pool serves."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
"""The smallest request, in bytes, that gets a segment of its own size."""
SEGMENT_ROUNDING_BYTES = 2 * MIB

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


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``size``."""
    return -(-size // multiple) * multiple


def round_request(size: int, power2_divisions: int = 1) -> int:
    """Return the size of the block that serves a request of ``size`` bytes, above 0.

    It is rounded up to one of ``power2_divisions`` steps between powers of two; 1 for off.

    Example:
        >>> round_request(1), round_request(513), round_request(1200 * 1024, power2_divisions=4)
        (512, 1024, 1310720)
    """
    if size <= MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    if power2_divisions > 1 and size > MIN_BLOCK_BYTES * power2_divisions:
        floor = 1 << (size.bit_length() - 1)
        return size if size == floor else round_up(size, max(1, floor // power2_divisions))
    return round_up(size, MIN_BLOCK_BYTES)


def segment_bytes(block_size: int) -> int:
    """Return the size of the segment taken from the device to serve a rounded request.

    Example:
        >>> [segment_bytes(size * MIB) // MIB for size in (1, 2, 11)]
        [2, 20, 12]
    """
    if block_size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_size < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(block_size, SEGMENT_ROUNDING_BYTES)


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
