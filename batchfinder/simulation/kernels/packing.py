"""Sequences of different lengths, packed into one for recurrent layers.

PyTorch's kernels read the lengths from memory, so the simulation has to know their values.
Source: ``aten/src/ATen/native/PackedSequence.cpp`` of PyTorch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._mode_utils import no_dispatch

from batchfinder.simulation.values.known import know, numbers_of
from batchfinder.simulation.values.shapes import new_tensor

_aten: Any = torch.ops.aten
_PACK = _aten._pack_padded_sequence.default


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Return the time steps one after the other, and the number of sequences in each."""
    known = numbers_of(lengths)
    if known is None:
        raise DynamicOutputShapeException(_PACK)
    with no_dispatch():
        value = torch.tensor(_numbers_above(known))
    sizes = new_tensor(lengths, value.shape, torch.int64)
    know(sizes, value)
    return new_tensor(input, [sum(known), *input.shape[2:]]), sizes


def pack_padded_sequence_backward(
    grad: Tensor, input_size: Sequence[int], batch_sizes: Tensor, batch_first: bool
) -> Tensor:
    """Run ``aten::_pack_padded_sequence_backward``: zeros, filled time step by time step."""
    if not batch_first:
        return grad.new_zeros(input_size)
    batch_size, steps, *features = input_size
    return grad.new_zeros([steps, batch_size, *features]).transpose(0, 1)


def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Run ``aten::_pad_packed_sequence``. Steps with the same batch size are copied at once."""
    known = numbers_of(batch_sizes)
    if known is None:
        raise DynamicOutputShapeException(_aten._pad_packed_sequence.default)
    steps = max(total_length, len(known))
    output = data.new_full((steps, known[0], *data.shape[1:]), padding_value)
    step = offset = 0
    for batch_size, run in groupby(known):
        length = len(list(run))
        piece = data[offset : offset + length * batch_size]
        piece = piece.view(length, batch_size, *data.shape[1:])
        output[step : step + length, :batch_size].copy_(piece)
        step += length
        offset += length * batch_size
    lengths = torch.tensor(_numbers_above(known))
    return output.transpose(0, 1) if batch_first else output, lengths


def _numbers_above(numbers: Sequence[int]) -> list[int]:
    """Return how many numbers are above each index. It turns lengths into batch sizes, and back.

    Example:
        >>> _numbers_above([4, 2, 1]), _numbers_above([3, 2, 1, 1])
        ([3, 2, 1, 1], [4, 2, 1])
    """
    rising = sorted(numbers)
    return [len(rising) - bisect_right(rising, place) for place in range(rising[-1])]


PACKING: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence_backward": pack_padded_sequence_backward,
    "_pad_packed_sequence": pad_packed_sequence,
}
"""The replacements of composite operators."""

PACK: dict[Any, Callable[..., Any]] = {_PACK: _pack}
"""The output rules of the one operator that is not composite."""
