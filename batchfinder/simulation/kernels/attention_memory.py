"""The memory that CUDA's attention kernels use while they run, besides their outputs.

Queries and keys are ``(batch, heads, length, head size)``.

Sources: ``aten/src/ATen/native/transformers/cuda/attention_backward.cu`` and
``.../cuda/flash_attn/flash_api.cpp`` of PyTorch. The tile sizes of the memory-efficient kernel
were derived from the requests to PyTorch's own allocator. The requests cover every generation of
GPUs and head sizes from 16 to 256.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from batchfinder.probing.devices.allocator.rounding import round_up
from batchfinder.simulation.gpus import NO_GPU, Gpu
from batchfinder.simulation.kernels.attention import ComputeCapability

_FLOAT_BYTES = 4
_LOCK_FLOATS = 4  # in each tile: a lock and a counter, aligned
_SPLIT_KEYS = 64
_ENOUGH_HEADS = 200  # over all examples; keys are split into at most this number / heads parts


def flash_backward_bytes(query: Tensor, key: Tensor) -> list[int]:
    """Return the bytes that the backward pass of flash attention uses, all at once.

    They are the gradient's row sums and the query's fp32 gradient. If several heads share a key,
    the gradients of keys and values exist for each head too, before they are added up.
    """
    batch, heads, length, head_size = query.shape
    rows = batch * heads * round_up(length, 128)
    width = round_up(head_size, 32 if head_size <= 128 else 64)
    sizes = [rows * _FLOAT_BYTES, rows * width * _FLOAT_BYTES]
    if key.size(1) != heads:
        sizes += [batch * heads * key.size(2) * head_size * query.element_size()] * 2
    return sizes


def efficient_forward_bytes(query: Tensor, value: Tensor) -> int:
    """Return the bytes of the fp32 output, needed if a tile of it does not fit into registers."""
    batch, heads, length, _ = query.shape
    head_size = value.size(-1)
    if query.element_size() == _FLOAT_BYTES or head_size <= 128:
        return 0
    return batch * heads * length * head_size * _FLOAT_BYTES


class EfficientBackward(NamedTuple):
    """One head's fp32 tiles of the gradients that several blocks of threads add to.

    Attributes:
        query_floats: elements for the query's gradient.
        split_floats: elements for the gradients of key and value, for each part of the keys.
        splits: the number of parts that the keys are split into. Many heads reduce it.

    Example:
        >>> kernel = EfficientBackward(query_floats=100, split_floats=10, splits=8)
        >>> kernel.bytes_of(1), kernel.bytes_of(1000)
        (720, 440000)
    """

    query_floats: int
    split_floats: int
    splits: int

    def bytes_of(self, heads: int, _: Gpu = NO_GPU) -> int:
        """Return the bytes for all heads of all examples. They are the same on every GPU."""
        splits = max(1, min(self.splits, _ENOUGH_HEADS // max(1, heads)))
        return heads * (self.query_floats + splits * self.split_floats) * _FLOAT_BYTES


def efficient_backward(
    query: Tensor, key: Tensor, capability: ComputeCapability
) -> EfficientBackward:
    """Return the memory that the backward pass of the memory-efficient kernel uses."""
    length, head_size = query.shape[2:]
    half = query.element_size() < _FLOAT_BYTES
    rows, columns = 64, 64
    # Gradients of key and value are summed in registers, unless a head is too large for that.
    keys = _SPLIT_KEYS if half and head_size > 128 else 0
    splits = -(-key.size(2) // _SPLIT_KEYS)
    if capability < (7, 0):
        if not half:
            return EfficientBackward(0, 0, 1)
        keys, splits = _SPLIT_KEYS if head_size > 64 else 0, 1
    elif head_size > 64 and (half or capability >= (8, 0)):
        rows = 128
        if half and head_size <= 128 and capability >= (8, 0):
            columns = 128
    tiles = -(-length // rows) * -(-head_size // columns)
    query_floats = tiles * (rows * columns + _LOCK_FLOATS)
    return EfficientBackward(query_floats, 2 * keys * round_up(head_size, rows), splits)
