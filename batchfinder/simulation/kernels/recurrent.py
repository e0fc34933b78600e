"""LSTM and GRU as cuDNN runs them: in one call, with a reserve for the backward pass.

On the CPU, PyTorch would run a product for each time step, or oneDNN's kernel. Both keep other
tensors. cuDNN does not publish the content of the reserve. The sizes that it requested in
https://github.com/pytorch/pytorch/issues/2895 equal the gates and the state of each time step,
layer and direction, plus the outputs between layers. cuDNN computes in fp32 for every type of
tensor, so the reserve is assumed to be fp32 too. Published results of Sequencer in half precision,
the only other data, need at least as much.

Sources: ``aten/src/ATen/native/cudnn/RNN.cpp`` and ``aten/src/ATen/cudnn/AutocastRNN.cpp`` of
PyTorch for all but the reserve, ``aten/src/ATen/native/RNN.cpp`` for an LSTM without cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Multiples of the hidden size in fp32: for each layer, and for the outputs between two layers.
_LSTM_RESERVE = 5
_GRU_RESERVE = 6
_BETWEEN_LAYERS = 1


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
    """Run ``aten::lstm.input`` as on CUDA."""
    if not torch.backends.cudnn.enabled:
        return _by_steps(
            input, hx, params, has_biases, num_layers, dropout * train, bidirectional, batch_first
        )
    output, *states = _run(_LSTM_RESERVE, input, hx, params, num_layers, bidirectional, batch_first)
    return output, states[0], states[1]


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
    """Run ``aten::gru.input`` as on CUDA."""
    output, state = _run(_GRU_RESERVE, input, [hx], params, num_layers, bidirectional, batch_first)
    return output, state


def _packed(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return the layer for sequences packed into one, which have no dimension of examples."""
    return lambda data, batch_sizes, *others: layer(data, *others, batch_first=False)


RECURRENT: dict[str, Callable[..., Any]] = {
    "lstm.input": lstm,
    "lstm.data": _packed(lstm),
    "gru.input": gru,
    "gru.data": _packed(gru),
}
"""The replacements by operator."""


def _by_steps(
    input: Tensor,  # noqa: A002
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM as without cuDNN: two products for each time step, and one kernel for the rest.

    Autocast casts the turned weights again for each product, and the backward pass keeps them all.
    """
    sequence = input.transpose(0, 1) if batch_first else input
    own = iter(params)
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in range(num_layers):
        if layer and dropout:
            sequence = torch.dropout(sequence, dropout, True)
        outputs = []
        for backwards in (False, True)[: 1 + bidirectional]:
            weights = [next(own).t(), next(own).t()]
            # The operator's fake kernel needs biases, even if they are not there.
            none = weights[0].new_empty(weights[0].size(1))
            biases = [next(own), next(own)] if has_biases else [none, none]
            hidden, cell = (state[len(ends)] for state in hx)
            steps = sequence.unbind(0)
            seen = []
            for step in reversed(steps) if backwards else steps:
                gates = [step.matmul(weights[0]), hidden.matmul(weights[1])]
                others = [tensor.to(gates[0].dtype) for tensor in (cell, *biases)]
                hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell.default(*gates, *others)
                seen.append(hidden)
            outputs.append(torch.stack(seen[::-1] if backwards else seen))
            ends.append((hidden, cell))
        sequence = torch.cat(outputs, -1) if bidirectional else outputs[0]
    hiddens, cells = (torch.stack(states) for states in zip(*ends, strict=True))
    return sequence.transpose(0, 1) if batch_first else sequence, hiddens, cells


def _run(
    reserve: int,
    input: Tensor,  # noqa: A002
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    dtype = input.dtype
    if torch.is_autocast_enabled("cpu") and input.is_floating_point():
        dtype = torch.get_autocast_dtype("cpu")
    directions = 2 if bidirectional else 1
    units = directions * (reserve * num_layers + _BETWEEN_LAYERS * (num_layers - 1))
    result: tuple[Tensor, ...] = _Recurrent.apply(  # type: ignore[no-untyped-call]
        input.to(dtype),
        directions,
        units,
        batch_first,
        len(states),
        *(state.to(dtype) for state in states),
        *params,
    )
    return result


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        sequence: Tensor,
        directions: int,
        units: int,
        batch_first: bool,
        num_states: int,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        states, params = rest[:num_states], rest[num_states:]
        dtype = sequence.dtype
        # The weights are already in one piece, but not in this type.
        flat = params[:1] if params[0].dtype is dtype else (_flat(params, dtype),)
        steps, size = sequence.shape[:-1], states[0].size(-1)
        # cuDNN reads one time step of all examples after the other.
        turned = torch.empty_like(sequence) if batch_first else sequence
        output = sequence.new_empty((*steps, directions * size))
        kept = sequence.new_empty((*steps, units * size), dtype=torch.float32)
        ctx.save_for_backward(sequence, output, kept, *flat, *states)
        ctx.params, ctx.batch_first = params, batch_first
        del turned
        return output, *(torch.empty_like(state) for state in states)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sequence, output, _, flat, *states = ctx.saved_tensors
        turned = [sequence, output] if ctx.batch_first else []
        turned = [torch.empty_like(tensor) for tensor in turned]
        before = torch.empty_like(sequence)
        del turned
        # One piece again. The gradients of the weights are views of it.
        whole = _flat(ctx.params, flat.dtype)
        pieces = torch.split(whole, [parameter.numel() for parameter in ctx.params])
        weights = (
            piece.view(parameter.shape).to(parameter.dtype)
            for piece, parameter in zip(pieces, ctx.params, strict=True)
        )
        first = (torch.empty_like(state) for state in states)
        return before, None, None, None, None, *first, *weights


def _flat(params: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return params[0].new_empty([sum(parameter.numel() for parameter in params)], dtype=dtype)
