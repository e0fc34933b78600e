"""The CTC loss, whose table of probabilities is as wide as the longest target.

Source: ``aten/src/ATen/native/cuda/LossCTC.cu`` of PyTorch. cuDNN's own is for targets of int32 on
the host alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from batchfinder.simulation.values.known import numbers_of
from batchfinder.simulation.values.shapes import new_like, new_tensor, run_on_shapes

_aten: Any = torch.ops.aten
_LOSS = _aten._ctc_loss.Tensor


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """The loss of each example, and its table: the time steps by the target with blanks around."""
    lengths = numbers_of(target_lengths) if isinstance(target_lengths, Tensor) else target_lengths
    if lengths is not None:
        longest = int(max(lengths, default=0))
    elif targets.dim() == 2:
        longest = targets.size(1)
    else:
        refused: tuple[Tensor, Tensor] = run_on_shapes(
            _LOSS, (log_probs, targets, input_lengths, target_lengths, *options), {}
        )
        return refused
    steps, batch_size = log_probs.shape[:2]
    table = new_tensor(log_probs, [batch_size, steps, 2 * longest + 1])
    return new_tensor(log_probs, [batch_size]), table


def _ctc_loss_backward(grad: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    return new_like(log_probs, torch.contiguous_format)


CTC_BACKWARDS = (_aten._ctc_loss_backward.Tensor, _aten._ctc_loss_backward.default)
"""They take another table while they run."""

CTC: dict[Any, Callable[..., Any]] = {
    _LOSS: _ctc_loss,
    _aten._ctc_loss.default: _ctc_loss,
    **dict.fromkeys(CTC_BACKWARDS, _ctc_loss_backward),
}
