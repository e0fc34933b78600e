"""Operators of the backward pass that write into their first argument on CUDA.

PyTorch copies that argument first if it is a tensor subclass, such as a fake tensor.

Source: ``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp`` and in
``aten/src/ATen/native`` of PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten
_SELECTIONS = {
    f"{name}Backward{number}"
    for name in ("Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Sort", "Topk")
    for number in (0, 1)
}
_LOGITS = "BinaryCrossEntropyWithLogitsBackward0"
_NODES: dict[Any, set[str]] = {
    _aten.scatter_add.default: {"GatherBackward0", "CummaxBackward0", "CumminBackward0"},
    _aten.index_add.default: {"IndexSelectBackward0"},
    _aten.index_put.default: {"IndexBackward0"},
    _aten.scatter.src: _SELECTIONS,
    _aten.logical_and.default: _SELECTIONS,
    _aten.logical_or.default: _SELECTIONS,
    _aten.sub.Tensor: {_LOGITS},
    _aten.mul.Tensor: {_LOGITS},
}


def works_in_place(func: Any, args: Any) -> bool:
    """Return True if an operator that is about to run would change its first argument on CUDA."""
    nodes = _NODES.get(func)
    if nodes is None:
        return False
    node = torch._C._current_autograd_node()
    if node is None or node.name() not in nodes:
        return False
    # A weight for each class is expanded over the targets, so it is not changed. A hook may
    # multiply by a number.
    if func is not _aten.mul.Tensor:
        return True
    if not isinstance(args[1], Tensor):
        return False
    shapes = args[0].shape, args[1].shape
    return bool(torch.broadcast_shapes(*shapes) == shapes[0])  # type: ignore[no-untyped-call]
