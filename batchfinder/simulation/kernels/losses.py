"""The outputs of CUDA's losses, where they differ from the CPU's.

Some losses are reduced into the storage that held one value for each element. The number that they
return keeps all of that storage while the loss is alive: through the backward pass, and the next
forward pass too. The table of probabilities of the CTC loss is as wide as the longest target.

Sources: ``aten/src/ATen/native/BinaryOps.cpp`` and ``PointwiseOps.cpp`` (the outputs are resized
after they were allocated), ``native/cuda/Loss.cu`` and ``native/cuda/LossCTC.cu`` of PyTorch. The
CTC loss of cuDNN accepts only int32 targets on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from batchfinder.simulation.values.known import numbers_of
from batchfinder.simulation.values.shapes import new_like, new_tensor, run_on_shapes

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
"""Losses that store each element's value in a temporary tensor, freed when they return."""


def _resized(func: Any) -> Callable[..., Tensor]:
    def loss(*args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = run_on_shapes(func, args, kwargs)
        return output if output.dim() else new_like(args[0]).as_strided((), ())

    return loss


_CTC_LOSS = _aten._ctc_loss.Tensor


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Return each example's loss, and the table of time steps by target with blanks around it."""
    lengths = numbers_of(target_lengths) if isinstance(target_lengths, Tensor) else target_lengths
    if lengths is not None:
        longest = int(max(lengths, default=0))
    elif targets.dim() == 2:
        longest = targets.size(1)
    else:
        refused: tuple[Tensor, Tensor] = run_on_shapes(
            _CTC_LOSS, (log_probs, targets, input_lengths, target_lengths, *options), {}
        )
        return refused
    steps, batch_size = log_probs.shape[:2]
    table = new_tensor(log_probs, [batch_size, steps, 2 * longest + 1])
    return new_tensor(log_probs, [batch_size]), table


def _ctc_loss_backward(grad: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    return new_like(log_probs, torch.contiguous_format)


CTC_BACKWARDS = (_aten._ctc_loss_backward.Tensor, _aten._ctc_loss_backward.default)
"""The backward operators of the CTC loss. They use another table while they run."""

LOSSES: dict[Any, Callable[..., Any]] = {
    **{func: _resized(func) for func in _RESIZED},
    _CTC_LOSS: _ctc_loss,
    _aten._ctc_loss.default: _ctc_loss,
    **dict.fromkeys(CTC_BACKWARDS, _ctc_loss_backward),
}
