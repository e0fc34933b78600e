"""The memory that the gradient of an embedding uses on CUDA, besides the gradient itself.

Rows that look up the same entry are summed in groups of ten. Then the groups are summed. Both sums
are in fp32 or fp64.

Sources: ``aten/src/ATen/native/cuda/Embedding.cu``, ``EmbeddingBag.cu`` and
``EmbeddingBackwardKernel.cu`` of PyTorch.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from batchfinder.simulation.gpus import NO_GPU, Gpu
from batchfinder.simulation.trace.recorder import copied_sizes
from batchfinder.simulation.trace.trace import Rule

_ROWS_OF_A_GROUP = 10

# Up to this many rows, each warp of the gradient's kernel reads all of them by itself.
_FEW_ROWS = 3072

_LARGEST = 2  # the mode "max" of an embedding bag


def group_bytes(
    rows: int, _: Gpu = NO_GPU, *, entries: int, width: int, sum_bytes: int = 4, at_once: int = 0
) -> int:
    """Return the bytes of the groups' sums.

    Args:
        rows: the number of rows that were looked up.
        entries: the number of entries in the table.
        width: the elements of a row.
        sum_bytes: the bytes of an element in the sums.
        at_once: up to this many rows there are no groups.

    Example:
        >>> group_bytes(8192, entries=50257, width=768) // 2**20
        26
    """
    if rows <= at_once:
        return 0
    return (rows // _ROWS_OF_A_GROUP + min(rows, entries)) * width * sum_bytes


def embedding_backward_sizes(args: Any, output: Tensor) -> list[int | Rule]:
    """Return the bytes that ``aten::embedding_dense_backward`` uses."""
    gradient, indices, _, _, scales = args
    return _sizes(gradient, indices, output, 0 if scales else _FEW_ROWS)


def embedding_bag_backward_sizes(args: Any, output: Tensor) -> list[int | Rule]:
    """Return the bytes that ``aten::_embedding_bag_backward`` uses, unless its mode is "max"."""
    gradient, indices, mode, is_sparse = args[0], args[1], args[8], args[9]
    return [] if mode == _LARGEST or is_sparse else _sizes(gradient, indices, output, 0)


def _sizes(gradient: Tensor, indices: Tensor, output: Tensor, at_once: int) -> list[int | Rule]:
    entries, width = output.shape
    amounts, index_bytes = (indices.numel(),), indices.element_size()
    summing = functools.partial(
        group_bytes, entries=entries, width=width, sum_bytes=max(4, output.element_size()),
        at_once=at_once,
    )  # fmt: skip
    # The sorted indices, the place that each came from, and the start of each group of equal ones.
    sorting = Rule(amounts, lambda rows, _: rows * index_bytes if rows > at_once else 0)
    return [*copied_sizes([gradient]), *[sorting] * 3, Rule(amounts, summing)]


# Up to 2048 indices are sorted as one tile, in registers. Up to 256 entries are sorted in one pass.
_SORTED_AT_ONCE, _IN_ONE_PASS = 2048, 256


def index_put_sizes(args: Any, _: Any) -> list[int | Rule]:
    """Return the bytes of ``aten::index_put`` if it accumulates: the gradient of ``weight[ids]``.

    It uses the indices as int64, sorted; the place that each came from; a range; and two more
    buffers for the sort. These were read from PyTorch's own allocator. Source:
    ``index_put_with_sort_kernel`` in ``aten/src/ATen/native/cuda/Indexing.cu``.
    """
    table, indices = args[:2]
    given = [(at, index) for at, index in enumerate(indices) if index is not None]
    if len(args) < 4 or not args[3] or any(index.dtype is torch.bool for _, index in given):
        return []
    entries = math.prod(table.size(at) for at, _ in given)
    shape = torch.broadcast_shapes(*(index.shape for _, index in given))  # type: ignore[no-untyped-call]
    rows, in_one_pass = math.prod(shape), entries <= _IN_ONE_PASS
    sorting = Rule((rows,), lambda n, _: 0 if in_one_pass or n <= _SORTED_AT_ONCE else 16 * n)
    return [*[8 * rows] * 4, sorting, *copied_sizes(args[2:3])]
