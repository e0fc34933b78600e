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


def convolution(images: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """Return the output of ``aten::convolution``."""
    stride, padding, dilation, transposed, output_padding, groups = options
    sizes, kernel = images.shape[2:], weight.shape[2:]
    sides = []
    for side, size in enumerate(sizes):
        # One number may stand for all sides.
        step, edge, spread, extra = (
            option[side] if len(option) > 1 else option[0]
            for option in (stride, padding, dilation, output_padding)
        )
        reach = spread * (kernel[side] - 1)
        if transposed:
            sides.append((size - 1) * step - 2 * edge + reach + extra + 1)
        else:
            sides.append((size + 2 * edge - reach - 1) // step + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    shape = [images.shape[0], channels, *sides]
    return new_tensor(images, shape, memory_format=compute_format(images, weight))


def convolution_backward(
    _: Tensor, images: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *options: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the outputs of ``aten::convolution_backward``."""
    memory_format = compute_format(images, weight)
    needs_images, needs_weight, needs_bias = options[-1]
    return (
        new_like(images, memory_format) if needs_images else None,
        new_like(weight, memory_format) if needs_weight else None,
        new_tensor(weight, bias_sizes or ()) if needs_bias else None,
    )


def compute_format(*tensors: Tensor) -> torch.memory_format:
    """Return the memory format of a computation: channels last if one of its tensors has it."""
    last = _FORMATS.get(tensors[0].dim())
    if last is not None:
        for tensor in tensors:
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
