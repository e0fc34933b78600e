"""Steps of the backward pass that write into zeros, unless tensors are of a kind of their own.

Fake tensors are of such a kind: for them PyTorch adds into a copy of the zeros.

Source: ``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp`` and in
``aten/src/ATen/native`` of PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

_aten: Any = torch.ops.aten
_SELECTIONS = {
    f"{name}Backward{number}"
    for name in ("Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Sort", "Topk")
    for number in (0, 1)
}
_NODES: dict[Any, set[str]] = {
    _aten.scatter_add.default: {"GatherBackward0"},
    _aten.index_add.default: {"IndexSelectBackward0"},
    _aten.index_put.default: {"IndexBackward0"},
    _aten.scatter.src: _SELECTIONS,
}


def writes_into_zeros(func: Any) -> bool:
    """Whether an operator that is about to run would, on CUDA, change its first argument."""
    nodes = _NODES.get(func)
    if nodes is None:
        return False
    node = torch._C._current_autograd_node()
    return node is not None and node.name() in nodes
