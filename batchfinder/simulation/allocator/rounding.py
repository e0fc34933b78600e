"""How many bytes PyTorch's caching allocator takes for a request.

Source: the constants and rules of ``c10/core/AllocatorConfig.h`` and
``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch.
"""

from __future__ import annotations

from batchfinder.units import MIB

MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
"""Up to here a request is served from the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
"""From here on a request gets a segment of its own size."""
SEGMENT_ROUNDING_BYTES = 2 * MIB


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
    return round_up(size, MIN_BLOCK_BYTES)


def segment_bytes(block_size: int) -> int:
    """The size of the segment taken from the device to serve a rounded request.

    Example:
        >>> [segment_bytes(size * MIB) // MIB for size in (1, 2, 11)]
        [2, 20, 12]
    """
    if block_size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_size < MIN_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(block_size, SEGMENT_ROUNDING_BYTES)
