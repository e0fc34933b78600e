"""LSTM and GRU as cuDNN runs them: in one call, with a reserve for the backward pass.

On the CPU PyTorch would run a product for each time step, or oneDNN's kernel, which keep other
tensors. What the reserve holds cuDNN does not publish; here it is what the backward pass needs of
each time step, layer and direction: the gates after their activation, the state, and the output.

Sources: ``aten/src/ATen/native/cudnn/RNN.cpp`` and ``aten/src/ATen/cudnn/AutocastRNN.cpp`` of
PyTorch for all but the reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# In units of the hidden size. An LSTM: four gates, cell and output. A GRU: three gates, the hidden
# part of the third before its gate, and the output.
_LSTM_RESERVE = 6
_GRU_RESERVE = 5


def lstm(
    input: Tensor,  # noqa: A002 - as the operator names it
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::lstm.input`` on CUDA."""
    output, hidden = _run(_LSTM_RESERVE, input, hx[0], params, num_layers, bidirectional)
    return output, hidden, torch.empty_like(hx[1], dtype=hidden.dtype)


def gru(
    input: Tensor,  # noqa: A002
    hx: Tensor,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """``aten::gru.input`` on CUDA."""
    return _run(_GRU_RESERVE, input, hx, params, num_layers, bidirectional)


RECURRENT: dict[str, Callable[..., Any]] = {"lstm.input": lstm, "gru.input": gru}
"""The replacements by operator."""


def _run(
    reserve: int,
    input: Tensor,  # noqa: A002
    hidden: Tensor,
    params: Sequence[Tensor],
    num_layers: int,
    bidirectional: bool,
) -> tuple[Tensor, Tensor]:
    dtype = input.dtype
    if torch.is_autocast_enabled("cpu") and input.is_floating_point():
        dtype = torch.get_autocast_dtype("cpu")
    directions = 2 if bidirectional else 1
    result: tuple[Tensor, Tensor] = _Recurrent.apply(  # type: ignore[no-untyped-call]
        input.to(dtype), hidden.to(dtype), reserve * num_layers * directions, directions, *params
    )
    return result


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sequence: Tensor, hidden: Tensor, reserve: int, directions: int, *params: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = sequence.dtype
        # The weights lie in one piece already, but not in this type.
        flat = params[:1] if params[0].dtype is dtype else (_flat(params, dtype),)
        steps, size = sequence.shape[:2], hidden.size(-1)
        output = sequence.new_empty((*steps, directions * size))
        kept = sequence.new_empty((*steps, reserve * size))
        ctx.save_for_backward(sequence, hidden, output, kept, *flat)
        ctx.params = params
        return output, torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sequence, hidden, _, _, flat = ctx.saved_tensors
        # One piece again, which the gradients of the weights are views of.
        whole = _flat(ctx.params, flat.dtype)
        pieces = torch.split(whole, [parameter.numel() for parameter in ctx.params])
        weights = (
            piece.view(parameter.shape).to(parameter.dtype)
            for piece, parameter in zip(pieces, ctx.params, strict=True)
        )
        return torch.empty_like(sequence), torch.empty_like(hidden), None, None, *weights


def _flat(params: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return params[0].new_empty([sum(parameter.numel() for parameter in params)], dtype=dtype)
