"""The outputs of CUDA's convolutions, in the memory format that they compute in.

Source: ``aten/src/ATen/native/Convolution.cpp`` and ``ConvUtils.h`` of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from batchfinder.simulation.values.shapes import new_like, new_tensor

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolution(
    input: Tensor,  # noqa: A002 - as the operator names it
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Return the output of ``aten::convolution``."""
    images, kernel = input.shape[2:], weight.shape[2:]
    sides = []
    for side in range(len(images)):
        # One number may stand for all sides.
        step, edge, spread, extra = (
            option[side] if len(option) > 1 else option[0]
            for option in (stride, padding, dilation, output_padding)
        )
        reach = spread * (kernel[side] - 1)
        if transposed:
            sides.append((images[side] - 1) * step - 2 * edge + reach + extra + 1)
        else:
            sides.append((images[side] + 2 * edge - reach - 1) // step + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return new_tensor(
        input, [input.shape[0], channels, *sides], memory_format=compute_format(input, weight)
    )


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the outputs of ``aten::convolution_backward``."""
    memory_format = compute_format(input, weight)
    needs_input, needs_weight, needs_bias = output_mask
    return (
        new_like(input, memory_format) if needs_input else None,
        new_like(weight, memory_format) if needs_weight else None,
        new_tensor(weight, bias_sizes or ()) if needs_bias else None,
    )


def compute_format(images: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the memory format of the computation: channels last if either tensor has it."""
    last = _FORMATS.get(images.dim())
    if last is not None:
        for tensor in (images, weight):
            if tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
                return last
    return torch.contiguous_format


def is_well_formed(args: Sequence[Any]) -> bool:
    """Return True if the kernel of ``aten::convolution`` accepts the arguments.

    PyTorch handles all other arguments, and its error says what is wrong.
    """
    images, weight, bias, _, _, _, transposed, _, groups = args
    return (
        images.dim() == weight.dim() > 2
        and images.dtype == weight.dtype
        and images.shape[1] == (weight.shape[0] if transposed else weight.shape[1] * groups)
        and (bias is None or bias.dtype == weight.dtype)
    )
