"""What CUDA's attention kernels take while they run, beside their outputs.

Sources: ``aten/src/ATen/native/transformers/cuda/attention_backward.cu`` and
``.../cuda/flash_attn/flash_api.cpp`` of PyTorch. The tile sizes of the memory-efficient kernel
follow from what PyTorch's own allocator was seen to be asked for, on every generation of GPUs and
for head sizes from 16 to 256.
"""

from __future__ import annotations

from torch import Tensor

from batchfinder.simulation.attention import ComputeCapability
from batchfinder.simulation.rounding import round_up

_FLOAT_BYTES = 4
_LOCK_FLOATS = 4  # of each tile: a lock and a counter, aligned


def flash_backward_bytes(query: Tensor) -> list[int]:
    """Row sums of the gradient, and the gradient of the query in fp32, both at once.

    Args:
        query: ``(batch, heads, length, head size)``.
    """
    batch, heads, length, head_size = query.shape
    rows = batch * heads * round_up(length, 128)
    width = round_up(head_size, 32 if head_size <= 128 else 64)
    return [rows * _FLOAT_BYTES, rows * width * _FLOAT_BYTES]


def efficient_forward_bytes(query: Tensor, value: Tensor) -> int:
    """The output in fp32, where a tile of it does not fit into registers."""
    batch, heads, length, _ = query.shape
    head_size = value.size(-1)
    if query.element_size() == _FLOAT_BYTES or head_size <= 128:
        return 0
    return batch * heads * length * head_size * _FLOAT_BYTES


def efficient_backward_bytes(query: Tensor, key: Tensor, capability: ComputeCapability) -> int:
    """Tiles of the gradients that several blocks of threads add to, in fp32.

    Args:
        query: ``(batch, heads, length, head size)``.
        key: see ``query``.
        capability: of the target GPU.
    """
    batch, heads, length, head_size = query.shape
    half = query.element_size() < _FLOAT_BYTES
    rows, columns = 64, 64
    # Gradients of key and value are summed in registers, unless a head is too large for that.
    keys = round_up(key.size(2), 64) if half and head_size > 128 else 0
    if capability < (7, 0):
        if not half:
            return 0
        keys = 64 if head_size > 64 else 0
    elif head_size > 64 and (half or capability >= (8, 0)):
        rows = 128
        if half and head_size <= 128 and capability >= (8, 0):
            columns = 128
    tiles = -(-length // rows) * -(-head_size // columns)
    floats = tiles * (rows * columns + _LOCK_FLOATS)
    floats += 2 * keys * round_up(head_size, rows)
    return batch * heads * floats * _FLOAT_BYTES
