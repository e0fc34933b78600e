"""The outputs of operators, where CUDA differs or where a direct rule is faster.

Normalizations return their outputs, and two statistics in fp32.

PyTorch would derive the same by running a dozen smaller operators on fake tensors for each. With
direct rules, a trace needs half the time.

Sources: ``aten/src/ATen/native/cudnn/BatchNorm.cpp``, ``native/cuda/layer_norm_kernel.cu`` and
``native/cuda/group_norm_kernel.cu`` of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from batchfinder.simulation.kernels.convolution import (
    convolution,
    convolution_backward,
    is_well_formed,
)
from batchfinder.simulation.kernels.elementwise import ELEMENTWISE, cast, elementwise, is_plain_cast
from batchfinder.simulation.kernels.in_place import works_in_place
from batchfinder.simulation.kernels.losses import LOSSES
from batchfinder.simulation.kernels.packing import PACK
from batchfinder.simulation.values.shapes import new_like, new_tensor, run_on_shapes

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _batch_norm(
    input: Tensor,  # noqa: A002 - as the operator names it
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    channels = input.size(1) if training else 0
    return new_like(input), _statistics(input, [channels]), _statistics(input, [channels])


def _layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    outer = input.dim() - len(normalized_shape)
    shape = [*input.shape[:outer], *([1] * len(normalized_shape))]
    output = new_like(input, torch.contiguous_format)
    return output, _statistics(input, shape), _statistics(input, shape)


def _group_norm(
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    bias: Tensor | None,
    batch_size: int,
    channels: int,
    others: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = [batch_size, groups]
    return new_like(input), _statistics(input, shape), _statistics(input, shape)


def _norm_backward(
    weight_at: int, shape_of: Callable[[Sequence[Any]], Sequence[int]]
) -> Callable[..., Gradients]:
    """Return the rule of a normalization whose weight is the argument at an index.

    The second argument is the input. The last one says which gradients are wanted.
    """
    return lambda *args: _gradients(args[1], args[weight_at], shape_of(args), args[-1])


def _channels(args: Sequence[Any]) -> Sequence[int]:
    return [args[1].size(1)]


def _efficient_attention(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return the output and the row sums; the seeds of the dropout stay on the host."""
    output, row_sums, *_ = run_on_shapes(_EFFICIENT_ATTENTION, (query, *args), kwargs)
    no_seed = new_tensor(query, [0], torch.int64)
    return output, row_sums, no_seed, no_seed


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the product of each group's rows with its matrix, in rows of whole 16 bytes.

    Mixtures of experts use it. PyTorch's own "meta" kernel accepts bfloat16 only. The sizes of the
    groups do not change the output's shape.
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/GroupedMMUtils.h
    """
    if mat_a.size(-1) != mat_b.size(-2):
        refused: Tensor = run_on_shapes(_GROUPED_MM, (mat_a, mat_b, offs, bias, out_dtype), {})
        return refused
    groups = 0 if offs is None else offs.size(0)
    rows, columns = mat_a.size(-2), mat_b.size(-1)
    if mat_a.dim() != mat_b.dim():
        shape = [rows, columns]
    else:
        shape = [groups if mat_a.dim() == 2 else mat_a.size(0), rows, columns]
    dtype = out_dtype or mat_a.dtype
    aligned = 16 // dtype.itemsize
    whole = new_tensor(mat_a, [*shape[:-1], -(-columns // aligned) * aligned], dtype)
    return whole[..., :columns]


def _addmm(bias: Tensor, left: Tensor, right: Tensor, **scales: Any) -> Tensor:
    """Return the rows of the left matrix by the columns of the right one, in a plain layer."""
    is_plain = left.dim() == right.dim() == 2 and bias.shape == right.shape[1:]
    if is_plain and left.shape[1] == right.shape[0] and bias.dtype is left.dtype is right.dtype:
        return new_tensor(left, [left.shape[0], right.shape[1]])
    output: Tensor = run_on_shapes(_ADDMM, (bias, left, right), scales)
    return output


def _mm(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the rows of the left matrix by the columns of the right one."""
    is_plain = left.dim() == right.dim() == 2 and not (args or kwargs)
    if is_plain and left.shape[1] == right.shape[0] and left.dtype is right.dtype:
        return new_tensor(left, [left.shape[0], right.shape[1]])
    output: Tensor = run_on_shapes(_MM, (left, right, *args), kwargs)
    return output


def _dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:  # noqa: A002
    return new_like(input), new_like(input, dtype=torch.bool)


def _col2im(columns: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return an output that keeps a storage of its input's size, even if the output is smaller.

    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Col2Im.cu
    """
    output: Tensor = run_on_shapes(_COL2IM, (columns, *args), kwargs)
    if output.numel() >= columns.numel():
        return output
    whole = new_like(columns, torch.contiguous_format)
    return whole.as_strided(output.shape, output.stride())


def _log_sigmoid(input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Return an empty buffer, which only the CPU fills: ``cuda/ActivationLogSigmoidKernel.cu``."""
    return new_like(input), new_tensor(input, [0])


def _like_first(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    return new_like(input)


def _like_second(_: Tensor, input: Tensor, *args: Any) -> Tensor:  # noqa: A002
    """Return the gradient of an input, for operators without a shape rule in PyTorch."""
    return new_like(input)


def _statistics(like: Tensor, shape: Sequence[int]) -> Tensor:
    dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    return new_tensor(like, shape, dtype)


def _gradients(
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    shape: Sequence[int],
    output_mask: Sequence[bool],
) -> Gradients:
    like = input if weight is None else weight
    return (
        new_like(input) if output_mask[0] else None,
        new_tensor(like, shape) if output_mask[1] else None,
        new_tensor(like, shape) if output_mask[2] else None,
    )


_aten: Any = torch.ops.aten
_COPIES = {
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
}
_ADDMM = _aten.addmm.default
_COL2IM = _aten.col2im.default
_CONVOLUTION = _aten.convolution.default
_MM = _aten.mm.default
_EFFICIENT_ATTENTION = _aten._scaled_dot_product_efficient_attention.default
_OUTPUTS: dict[Any, Callable[..., Any]] = {
    _ADDMM: _addmm,
    _MM: _mm,
    _CONVOLUTION: convolution,
    _aten.convolution_backward.default: convolution_backward,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _norm_backward(2, _channels),
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _norm_backward(5, lambda args: args[2]),
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _norm_backward(4, _channels),
    _aten.native_dropout.default: _dropout,
    _aten.native_dropout_backward.default: _like_first,
    _EFFICIENT_ATTENTION: _efficient_attention,
    _COL2IM: _col2im,
    _aten.log_sigmoid_forward.default: _log_sigmoid,
    _aten.log_sigmoid_backward.default: _like_second,
    _aten.multi_margin_loss_backward.default: _like_second,
    _aten.multilabel_margin_loss_backward.default: _like_second,
    _aten._sample_dirichlet.default: _like_first,
    _aten._dirichlet_grad.default: _like_first,
    _aten._standard_gamma_grad.default: _like_first,
    **LOSSES,
    **PACK,
}
if hasattr(_aten, "_grouped_mm"):  # since 2.8
    _GROUPED_MM = _aten._grouped_mm.default
    _OUTPUTS[_GROUPED_MM] = _grouped_mm


def outputs_of(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the outputs of an operator, when called below autograd."""
    if works_in_place(func, args):
        return args[0]
    rule = _OUTPUTS.get(func)
    if rule is not None and (func is not _CONVOLUTION or is_well_formed(args)):
        return rule(*args, **kwargs)
    output = None
    if func in ELEMENTWISE:
        output = elementwise(args, kwargs)
    elif func in _COPIES and is_plain_cast(kwargs):
        output = cast(*args, **kwargs)
    return run_on_shapes(func, args, kwargs) if output is None else output
