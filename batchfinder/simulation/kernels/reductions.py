"""Buffers of CUDA's reductions if many blocks of threads share one, as in the gradient of a bias.

Each block leaves its part in a buffer. The buffer is larger than the parts: each output uses as
much as a block's whole row of outputs. So it can be 1 MiB for each multiprocessor, and four times
as much for ``max.dim``. The numbers are for NVIDIA's GPUs, and are used for AMD's too.

Sources: ``aten/src/ATen/native/cuda/Reduce.cuh`` of PyTorch, ``get_dim_to_split`` in
``aten/src/ATen/TensorIterator.cpp``; for the parts, ``ReduceMomentKernel.cu``,
``ReduceMinValuesKernel.cu`` and similar files in ``aten/src/ATen/native/cuda``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchfinder.simulation.gpus import Gpu
from batchfinder.simulation.trace.recorder import held
from batchfinder.simulation.trace.trace import Rule

_LARGEST_TENSOR = 1 << 31  # bytes that a kernel with 32-bit indices can address

_SEMAPHORE_BYTES = 4
_WARP = 32
_MOST_THREADS = 512
_VECTOR = 4
_LONG_ROW = 128  # elements; rows of at least this length are read in vectors
_LEAST_VALUES, _MOST_VALUES = 16, 256  # for each thread


class Reduction(NamedTuple):
    """The kernel that reduces a tensor. For a sum, it adds up elements.

    Attributes:
        along_rows: True if the elements of one sum are adjacent in memory, not the sums.
        vector: the number of elements read at once, along the row.
        element_bytes: the bytes of an element that is added up.
        part_bytes: the bytes that a block leaves for each sum.
        outputs: the number of sums in the tensor that was traced.
        keeps_outermost: True if the dimension with the largest stride is not summed up.

    Example:
        >>> from batchfinder.simulation.gpus import find_gpu
        >>> bias = Reduction(False, vector=4, element_bytes=4, part_bytes=4, outputs=4096)
        >>> [bias.buffer_bytes(4096, 4096, find_gpu(name)) // 2**20 for name in ("h100", "rtx3090")]
        [128, 62]
    """

    along_rows: bool
    vector: int
    element_bytes: int
    part_bytes: int
    outputs: int
    keeps_outermost: bool = False

    def buffer_bytes(self, inputs: int, outputs: int, gpu: Gpu) -> int:
        """Return the bytes of the buffer through which the blocks share their parts.

        Args:
            inputs: the elements of each sum.
            outputs: the number of sums.
            gpu: the GPU that sums up.
        """
        inputs, outputs = self._largest_part(inputs, outputs)
        blocks, _, width = self._blocks(inputs, outputs, gpu.threads)
        size = self.part_bytes * outputs * blocks
        return size if self.along_rows else size * width * self.vector

    def semaphore_bytes(self, inputs: int, outputs: int, gpu: Gpu) -> int:
        """Return the bytes of the semaphores that find the last block; same arguments."""
        inputs, outputs = self._largest_part(inputs, outputs)
        blocks, grid, _ = self._blocks(inputs, outputs, gpu.threads)
        return _SEMAPHORE_BYTES * grid if blocks else 0

    def _blocks(self, inputs: int, outputs: int, threads: int) -> tuple[int, int, int]:
        """Return the blocks that share a sum (0 for one alone), the grid's columns, their width."""
        row, others = (inputs, outputs) if self.along_rows else (outputs, inputs)
        most = _MOST_THREADS if self.along_rows else _MOST_THREADS // self.vector
        row_threads = min(_power_of_2(row // self.vector), most)
        height = min(_power_of_2(others), most, most // min(row_threads, _WARP))
        width = min(row_threads, most // height)
        at_once, beside = (width, 1) if self.along_rows else (1, width)
        shares = -(-inputs // at_once) >= min(height * _LEAST_VALUES, _MOST_VALUES)
        if shares:
            at_once *= height
        else:
            beside *= height
        columns = outputs if self.along_rows else outputs // self.vector
        grid = -(-columns // beside)
        fitting = threads // (width * height)
        values = -(-inputs // at_once)
        if not shares or values < _MOST_VALUES or grid > fitting:
            return 0, grid, width
        blocks = min(-(-fitting // grid), -(-values // _LEAST_VALUES))
        blocks = max(blocks, -(-values // _MOST_VALUES))
        return blocks if blocks > 1 else 0, grid, width

    def _largest_part(self, inputs: int, outputs: int) -> tuple[int, int]:
        """Return the inputs and outputs of the largest part of a tensor.

        A tensor too large for one kernel is summed half by half. The dimension with the largest
        stride is cut first, until its size is 1.
        """
        while inputs * outputs * self.element_bytes > _LARGEST_TENSOR:
            if outputs > 1 and (self.keeps_outermost or inputs == 1):
                outputs = -(-outputs // 2)
            else:
                inputs = -(-inputs // 2)
        return inputs, outputs


class Part(NamedTuple):
    """The intermediate value that an operator reduces to, before the output.

    Attributes:
        least_bytes: the smallest size of a part.
        factor: the bytes of a part as a multiple of an element's bytes.
        vector: the number of elements read at once.
    """

    least_bytes: int = 4
    factor: int = 1
    vector: int = 4

    def bytes_of(self, element_bytes: int) -> int:
        """Return the bytes of a part, from the bytes of an element."""
        return max(self.least_bytes, self.factor * element_bytes)


SUM = Part()  # half types are added up in fp32
EXTREME = Part(least_bytes=1)
PLACE = Part(least_bytes=16)  # an extreme, and its index as int64
MOMENTS = Part(least_bytes=16, factor=4, vector=2)  # mean, squared differences, and two counts


def reduction(
    tensor: Tensor, dims: Collection[int], element_bytes: int, part: Part = SUM
) -> Reduction:
    """Return the kernel that reduces some dimensions of a tensor.

    Args:
        tensor: the tensor to reduce, with at least one dimension.
        dims: the dimensions to reduce; empty for all.
        element_bytes: the bytes of an element in the type that the kernel reads.
        part: the intermediate value of the operator.
    """
    reduced = {dim % tensor.dim() for dim in dims} or set(range(tensor.dim()))
    sides = list(zip(tensor.stride(), tensor.shape, strict=True))
    inner = _merged(sorted(sides[dim] for dim in reduced))
    # In the order of the sums, which are contiguous.
    kept = _merged([side for dim, side in enumerate(sides) if dim not in reduced][::-1])
    outputs = math.prod(size for _, size in kept)
    along_rows = not kept or (bool(inner) and inner[0][0] < kept[0][0])
    vector = 1
    if along_rows:
        is_row = len(inner) == 1 and inner[0][0] == 1 and inner[0][1] >= _LONG_ROW
        vector = part.vector if is_row else 1
    elif kept[0][0] == 1:
        strides = [stride for stride, _ in (*inner, *kept[1:])]
        whole = (tensor.storage_offset(), kept[0][1], *strides)
        vector = next(n for n in (_VECTOR, 2, 1) if all(number % n == 0 for number in whole))
    keeps_outermost = bool(kept) and (not inner or kept[-1][0] > inner[-1][0])
    part_bytes = part.bytes_of(element_bytes)
    return Reduction(along_rows, vector, element_bytes, part_bytes, outputs, keeps_outermost)


def _merged(sides: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return strides and sizes, with dimensions merged that are contiguous with the one before."""
    merged: list[tuple[int, int]] = []
    for stride, size in sides:
        if size == 1:
            continue
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((stride, size))
    return merged


def _power_of_2(number: int) -> int:
    """Return the largest power of 2 that is at most the number; at least 1."""
    return 1 << max(0, number.bit_length() - 1)


def _sum_sizes(args: Any, output: Any) -> list[int | Rule]:
    """Return a sum's buffers, and the copy of its tensor if the sum computes in another type.

    Source: ``make_reduction`` in ``aten/src/ATen/native/ReduceOpsUtils.h`` of PyTorch.
    """
    tensor, dtype = held(args[0]), output.dtype
    widens = tensor.element_size() == 2 and dtype is torch.float32
    if tensor.dtype == dtype or widens:
        return _buffers(tensor, args[1:2], tensor.element_size(), SUM)
    copied = tensor.numel() * dtype.itemsize
    return [copied, *_buffers(tensor, args[1:2], dtype.itemsize, SUM)]


def _sizes(part: Part, args: Any, output: Any, *, dims_at: int = 1) -> list[int | Rule]:
    """Return the buffers of a reduction that reads its tensor without a copy."""
    tensor = held(args[0])
    dims = args[dims_at : dims_at + 1]
    return _buffers(tensor, dims, tensor.element_size(), part)


def _buffers(
    tensor: Tensor, given: Sequence[Any], element_bytes: int, part: Part
) -> list[int | Rule]:
    if not tensor.dim() or not tensor.numel():
        return []
    dims = given[0] if given and not isinstance(given[0], torch.dtype) else None
    dims = [dims] if isinstance(dims, int) else dims or []
    kernel = reduction(tensor, dims, element_bytes, part)
    amounts = tensor.numel() // kernel.outputs, kernel.outputs
    return [Rule(amounts, kernel.buffer_bytes), Rule(amounts, kernel.semaphore_bytes)]


_aten: Any = torch.ops.aten
REDUCTIONS: dict[Any, Callable[[Any, Any], Sequence[int | Rule]]] = {
    **dict.fromkeys(
        (
            _aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim,
            _aten.prod.default, _aten.prod.dim_int,
        ),
        _sum_sizes,
    ),
    **dict.fromkeys(
        (_aten.max.dim, _aten.min.dim, _aten.argmax.default, _aten.argmin.default),
        partial(_sizes, PLACE),
    ),
    **dict.fromkeys(
        (_aten.max.default, _aten.min.default, _aten.amax.default, _aten.amin.default),
        partial(_sizes, EXTREME),
    ),
    **dict.fromkeys(
        (_aten.var.correction, _aten.std.correction, _aten.var_mean.correction,
         _aten.std_mean.correction),
        partial(_sizes, MOMENTS),
    ),
    _aten.linalg_vector_norm.default: partial(_sizes, SUM, dims_at=2),
}  # fmt: skip
"""The bytes that an operator uses, from its arguments and its output."""
