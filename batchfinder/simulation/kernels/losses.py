"""Losses that CUDA reduces into the storage that held one value for each element.

The number that they return keeps all of that storage as long as the loss itself is alive: through
the backward pass, and the next forward pass too.

Sources: ``aten/src/ATen/native/BinaryOps.cpp`` and ``PointwiseOps.cpp`` (the outputs are resized
after they were allocated) and ``native/cuda/Loss.cu`` of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from batchfinder.simulation.values.shapes import new_like, run_on_shapes

_aten: Any = torch.ops.aten
_RESIZED = {
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default,
}
COPYING_LOSSES = {
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.huber_loss.default,
}
"""Those that compute the value for each element in a tensor that is gone when they return."""


def _resized(func: Any) -> Callable[..., Tensor]:
    def loss(*args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = run_on_shapes(func, args, kwargs)
        return output if output.dim() else new_like(args[0]).as_strided((), ())

    return loss


LOSSES: dict[Any, Callable[..., Tensor]] = {func: _resized(func) for func in _RESIZED}
