"""CUDA's convolutions: their outputs, in the memory format that they compute in, and workspaces.

Source of the outputs: ``Convolution.cpp`` and ``ConvUtils.h`` in ``aten/src/ATen/native``. cuDNN
does not publish the sizes of its workspaces. Their rules are from recordings of real GPUs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchfinder.probing.devices.allocator.blocks import round_up
from batchfinder.simulation.kernels.attention import ComputeCapability
from batchfinder.simulation.values.shapes import new_like, new_tensor

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

TENSOR_FLOAT_SINCE: ComputeCapability = (8, 0)
"""The first GPUs that compute fp32 convolutions on tensor cores, as TF32."""

# Winograd's algorithm keeps 6 x 6 numbers of 4 bytes for each tile of 4 x 4 pixels and for each
# filter. Up to 64 channels, cuDNN 8.0 on a V100 used another algorithm, except for the weight.
_TILE, _TILE_BYTES = 4, 6 * 6 * 4
_FEW_CHANNELS = 64

# The gradient of images by 1x1 filters had a workspace from 784 tiles of 128 x 128 elements on. Up
# to 392 tiles it had none. Both were seen on the 80 multiprocessors of that V100.
_MATRIX_TILE = 128
_MANY_TILES = 512

# Tensor cores read the channels of half types in vectors of 16 bytes.
_CHANNELS_AT_ONCE = 8


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


class Direction(enum.Enum):
    """The result that one call of cuDNN computes."""

    OUTPUT = "output"
    IMAGES = "gradient of the images"
    WEIGHT = "gradient of the weight"


class Convolution(NamedTuple):
    """A convolution. A transposed one is the gradient of another convolution's images.

    Attributes:
        images: the images that the filter moves over, ``(batch, channels, ...)``.
        outputs: the outputs, ``(batch, filters, ...)``.
        weight: the filter.
        stride: the stride of the filter.
        dilation: the dilation of the filter.
    """

    images: Tensor
    outputs: Tensor
    weight: Tensor
    stride: Sequence[int]
    dilation: Sequence[int]

    def workspace_bytes(self, direction: Direction, capability: ComputeCapability) -> int:
        """Return the bytes that a call uses if its images are in the contiguous format."""
        channels = self.weight.size(1)
        if channels == 1:
            return 0  # PyTorch's own kernel, for one filter per channel
        kernel = list(self.weight.shape[2:])
        if not torch.backends.cudnn.enabled:
            return self._unfolded_bytes(kernel)
        is_grouped = channels != self.images.size(1)
        if (
            not is_grouped
            and self.weight.dtype is torch.float32
            and capability < TENSOR_FLOAT_SINCE
        ):
            return self._full_precision_bytes(direction, kernel)
        # Tensor cores compute channels last. cuDNN copies the filter, and images in the other
        # format, into its workspace. "Tensor Layouts In Memory: NCHW vs NHWC" in
        # https://docs.nvidia.com/deeplearning/performance/dl-performance-convolutional
        is_half = self.weight.element_size() == 2
        # Filters that do not overlap are a matrix product.
        if math.prod(kernel) == 1 or (kernel == list(self.stride) and not is_half):
            return 0
        padded = round_up(channels, _CHANNELS_AT_ONCE) if is_half and not is_grouped else channels
        copied = self.images.nbytes + self.weight.nbytes
        return copied // channels * padded + self.outputs.nbytes

    def _unfolded_bytes(self, kernel: list[int]) -> int:
        """Return the bytes of PyTorch's own kernels, which unfold one example at a time.

        https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/ConvolutionMM2d.cu
        """
        if math.prod(kernel) == 1:
            return 0
        pixels = math.prod(self.outputs.shape[2:])
        return self.weight[0].numel() * pixels * self.weight.element_size()

    def _full_precision_bytes(self, direction: Direction, kernel: list[int]) -> int:
        batch, channels, *sides = self.images.shape
        filters = self.outputs.size(1)
        copied = self.images.nbytes + self.weight.nbytes
        is_strided, is_forward = max(self.stride) > 1, direction is Direction.OUTPUT
        if kernel == [1, 1] and not is_strided and direction is Direction.IMAGES:
            rows, columns = (-(-n // _MATRIX_TILE) for n in (channels, batch * math.prod(sides)))
            return copied if rows * columns >= _MANY_TILES else 0
        if kernel != [3, 3] or max(self.dilation) > 1:
            return 0
        if is_strided:
            return copied + self.outputs.nbytes if is_forward else 0
        if direction is not Direction.WEIGHT and max(channels, filters) <= _FEW_CHANNELS:
            return 0
        tiles = batch * math.prod(-(-side // _TILE) for side in self.outputs.shape[2:])
        return _TILE_BYTES * (channels * filters + tiles * (channels + filters))
