"""What the gradient of an embedding takes on CUDA beside itself.

The rows that look up the same entry are summed in groups of ten, before the groups are, in
fp32 or fp64.

Sources: ``aten/src/ATen/native/cuda/Embedding.cu``, ``EmbeddingBag.cu`` and
``EmbeddingBackwardKernel.cu`` of PyTorch.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from batchfinder.simulation.gpus import NO_GPU, Gpu
from batchfinder.simulation.trace.recorder import Recorder, copied_sizes, take
from batchfinder.simulation.trace.trace import Rule

_ROWS_OF_A_GROUP = 10

# Up to so many rows each warp of the gradient's kernel goes through all of them by itself.
_FEW_ROWS = 3072

_LARGEST = 2  # mode of a bag


def group_bytes(
    rows: int, _: Gpu = NO_GPU, *, entries: int, width: int, sum_bytes: int = 4, at_once: int = 0
) -> int:
    """The sums of the groups.

    Args:
        rows: that were looked up.
        entries: of the table.
        width: of a row, in elements.
        sum_bytes: of an element.
        at_once: up to so many rows there are no groups.

    Example:
        >>> group_bytes(8192, entries=50257, width=768) // 2**20
        26
    """
    if rows <= at_once:
        return 0
    return (rows // _ROWS_OF_A_GROUP + min(rows, entries)) * width * sum_bytes


def note_embedding_backward(recorder: Recorder, args: Any, output: Tensor) -> None:
    """Note what ``aten::embedding_dense_backward`` takes."""
    gradient, indices, _, _, scales = args
    _note(recorder, gradient, indices, output, 0 if scales else _FEW_ROWS)


def note_embedding_bag_backward(recorder: Recorder, args: Any, output: Tensor) -> None:
    """Note what ``aten::_embedding_bag_backward`` takes, unless it picks the largest."""
    gradient, indices, mode, is_sparse = args[0], args[1], args[8], args[9]
    if mode != _LARGEST and not is_sparse:
        _note(recorder, gradient, indices, output, 0)


def _note(
    recorder: Recorder, gradient: Tensor, indices: Tensor, output: Tensor, at_once: int
) -> None:
    entries, width = output.shape
    sorting = functools.partial(_index_bytes, each=indices.element_size(), at_once=at_once)
    summing = functools.partial(
        group_bytes, entries=entries, width=width, sum_bytes=max(4, output.element_size()),
        at_once=at_once,
    )  # fmt: skip
    # Sorted, where each came from, and where each group of equal ones begins.
    rows = (indices.numel(),)
    take(recorder, [*copied_sizes([gradient]), *(Rule(rows, r) for r in (*[sorting] * 3, summing))])


def _index_bytes(rows: int, _: Gpu, *, each: int, at_once: int) -> int:
    return rows * each if rows > at_once else 0
