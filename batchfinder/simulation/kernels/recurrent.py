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
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Multiples of the hidden size in fp32: for each layer, and for the outputs between two layers.
_LSTM_RESERVE = 5
_GRU_RESERVE = 6
_BETWEEN_LAYERS = 1


class _Layers(NamedTuple):
    """The arguments of ``aten::lstm`` and ``aten::gru`` after the sequence and its states."""

    params: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False  # sequences packed into one have no dimension of examples


def lstm(sequence: Tensor, states: Sequence[Tensor], *options: Any) -> tuple[Tensor, ...]:
    """Run ``aten::lstm.input`` as on CUDA."""
    run = _run if torch.backends.cudnn.enabled else _by_steps
    return run(sequence, states, _Layers(*options), _LSTM_RESERVE)


def gru(sequence: Tensor, state: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """Run ``aten::gru.input`` as on CUDA."""
    return _run(sequence, [state], _Layers(*options), _GRU_RESERVE)


RECURRENT: dict[str, Callable[..., Any]] = {
    "lstm.input": lstm,
    "lstm.data": lambda sequence, batch_sizes, *others: lstm(sequence, *others),
    "gru.input": gru,
    "gru.data": lambda sequence, batch_sizes, *others: gru(sequence, *others),
}
"""The replacements by operator."""


def _by_steps(
    sequence: Tensor, states: Sequence[Tensor], layers: _Layers, _: int
) -> tuple[Tensor, ...]:
    """Run an LSTM as without cuDNN: two products for each time step, and one kernel for the rest.

    Autocast casts the turned weights again for each product, and the backward pass keeps them all.
    """
    sequence = sequence.transpose(0, 1) if layers.batch_first else sequence
    own = iter(layers.params)
    ends: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers.num_layers):
        if layer and layers.dropout and layers.train:
            sequence = torch.dropout(sequence, layers.dropout, True)
        outputs = []
        for backwards in (False, True)[: 1 + layers.bidirectional]:
            weights = [next(own).t(), next(own).t()]
            # The operator's fake kernel needs biases, even if they are not there.
            none = weights[0].new_empty(weights[0].size(1))
            biases = [next(own), next(own)] if layers.has_biases else [none, none]
            hidden, cell = (state[len(ends)] for state in states)
            steps = sequence.unbind(0)
            seen = []
            for step in reversed(steps) if backwards else steps:
                gates = [step.matmul(weights[0]), hidden.matmul(weights[1])]
                others = [tensor.to(gates[0].dtype) for tensor in (cell, *biases)]
                hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell.default(*gates, *others)
                seen.append(hidden)
            outputs.append(torch.stack(seen[::-1] if backwards else seen))
            ends.append((hidden, cell))
        sequence = torch.cat(outputs, -1) if layers.bidirectional else outputs[0]
    last = (torch.stack(of_kind) for of_kind in zip(*ends, strict=True))
    return sequence.transpose(0, 1) if layers.batch_first else sequence, *last


def _run(
    sequence: Tensor, states: Sequence[Tensor], layers: _Layers, reserve: int
) -> tuple[Tensor, ...]:
    dtype = sequence.dtype
    if torch.is_autocast_enabled("cpu") and sequence.is_floating_point():
        dtype = torch.get_autocast_dtype("cpu")
    directions = 2 if layers.bidirectional else 1
    between = _BETWEEN_LAYERS * (layers.num_layers - 1)
    sizes = directions, directions * (reserve * layers.num_layers + between)
    tensors = [tensor.to(dtype) for tensor in (sequence, *states)]
    result: tuple[Tensor, ...] = _Recurrent.apply(  # type: ignore[no-untyped-call]
        sizes, layers.batch_first, len(states), *tensors, *layers.params
    )
    return result


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sizes: tuple[int, int], batch_first: bool, num_states: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        sequence, states = tensors[0], tensors[1 : 1 + num_states]
        params = tensors[1 + num_states :]
        directions, units = sizes
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
        return None, None, None, before, *first, *weights


def _flat(params: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return params[0].new_empty([sum(parameter.numel() for parameter in params)], dtype=dtype)
