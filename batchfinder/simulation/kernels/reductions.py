"""What CUDA's sums take where many blocks of threads share one: the gradient of a bias, say.

Each block leaves its part in a buffer, which counts more than that: for every output as much as for
a block's whole row of them. So it can be 1 MiB for each multiprocessor. The numbers are those of
NVIDIA's GPUs, and stand for AMD's, too.

Sources: ``aten/src/ATen/native/cuda/Reduce.cuh`` of PyTorch, and ``get_dim_to_split`` in
``aten/src/ATen/TensorIterator.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from batchfinder.simulation.gpus import Gpu

_SUM_BYTES = 4  # half types are added up in fp32
_LARGEST_TENSOR = 1 << 31  # bytes, that a kernel with indices of 32 bits reaches

_SEMAPHORE_BYTES = 4
_WARP = 32
_MOST_THREADS = 512
_VECTOR = 4
_LONG_ROW = 128  # elements; rows of so many are read in vectors
_LEAST_VALUES, _MOST_VALUES = 16, 256  # for each thread


class Reduction(NamedTuple):
    """The kernel that sums up a tensor.

    Attributes:
        along_rows: whether what is added up lies side by side in memory, rather than the sums.
        vector: how many elements are read at once, along the row.
        element_bytes: of what is added up.
        outputs: how many sums there were when this was looked up.
        keeps_outermost: whether the dimension that reaches farthest in memory is not summed up.

    Example:
        >>> from batchfinder.simulation.gpus import find_gpu
        >>> bias = Reduction(along_rows=False, vector=4, element_bytes=4, outputs=4096)
        >>> [bias.buffer_bytes(4096, 4096, find_gpu(name)) // 2**20 for name in ("h100", "rtx3090")]
        [128, 62]
    """

    along_rows: bool
    vector: int
    element_bytes: int
    outputs: int
    keeps_outermost: bool = False

    def buffer_bytes(self, inputs: int, outputs: int, gpu: Gpu) -> int:
        """What the blocks leave for each other.

        Args:
            inputs: elements of each sum.
            outputs: how many sums there are.
            gpu: that sums up.
        """
        inputs, outputs = self._largest_part(inputs, outputs)
        blocks, _, width = self._blocks(inputs, outputs, gpu.threads)
        size = max(_SUM_BYTES, self.element_bytes) * outputs * blocks
        return size if self.along_rows else size * width * self.vector

    def semaphore_bytes(self, inputs: int, outputs: int, gpu: Gpu) -> int:
        """By what they know who comes last; see :meth:`buffer_bytes`."""
        inputs, outputs = self._largest_part(inputs, outputs)
        blocks, grid, _ = self._blocks(inputs, outputs, gpu.threads)
        return _SEMAPHORE_BYTES * grid if blocks else 0

    def _blocks(self, inputs: int, outputs: int, threads: int) -> tuple[int, int, int]:
        """Blocks that share a sum, 0 for one alone; those beside each other; their width."""
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
        """Of a tensor too large for one kernel, which is summed half by half.

        The dimension that reaches farthest is cut, until nothing of it is left to cut.
        """
        while inputs * outputs * self.element_bytes > _LARGEST_TENSOR:
            if outputs > 1 and (self.keeps_outermost or inputs == 1):
                outputs = -(-outputs // 2)
            else:
                inputs = -(-inputs // 2)
        return inputs, outputs


def reduction(tensor: Tensor, dims: Collection[int], element_bytes: int) -> Reduction:
    """The kernel that sums up some dimensions of a tensor.

    Args:
        tensor: that is summed up, of at least one dimension.
        dims: what is summed up; empty for all.
        element_bytes: of the type that it is read in.
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
        vector = _VECTOR if is_row else 1
    elif kept[0][0] == 1:
        strides = [stride for stride, _ in (*inner, *kept[1:])]
        whole = (tensor.storage_offset(), kept[0][1], *strides)
        vector = next(n for n in (_VECTOR, 2, 1) if all(number % n == 0 for number in whole))
    keeps_outermost = bool(kept) and (not inner or kept[-1][0] > inner[-1][0])
    return Reduction(along_rows, vector, element_bytes, outputs, keeps_outermost)


def _merged(sides: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Strides and sizes, those that go on where the one before ends as one with it."""
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
    """The largest that is no larger; at least 1."""
    return 1 << max(0, number.bit_length() - 1)
