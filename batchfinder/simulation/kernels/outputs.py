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
from batchfinder.simulation.kernels.losses import LOSSES
from batchfinder.simulation.kernels.packing import PACK
from batchfinder.simulation.values.shapes import new_like, new_tensor, run_on_shapes

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
_ShapeOf = Callable[[Sequence[Any]], Sequence[int]]


def _norm(
    shape_of: _ShapeOf, memory_format: torch.memory_format = torch.preserve_format
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return the rule of a normalization whose two statistics have a shape by its arguments."""

    def outputs(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        values, shape = args[0], shape_of(args)
        exact = torch.float64 if values.dtype is torch.float64 else torch.float32
        statistics = [new_tensor(values, shape, exact) for _ in range(2)]
        return new_like(values, memory_format), statistics[0], statistics[1]

    return outputs


def _rows(args: Sequence[Any]) -> Sequence[int]:
    """Return the shape of a layer norm's statistics: one number for each row."""
    values, normalized_shape = args[:2]
    inner = len(normalized_shape)
    return [*values.shape[: values.dim() - inner], *([1] * inner)]


def _norm_backward(weight_at: int, shape_of: _ShapeOf) -> Callable[..., Gradients]:
    """Return the rule of a normalization whose weight is the argument at an index.

    The second argument is the input. The last one says which gradients are wanted.
    """

    def gradients(*args: Any) -> Gradients:
        values, weight, shape, needed = args[1], args[weight_at], shape_of(args), args[-1]
        like = values if weight is None else weight
        return (
            new_like(values) if needed[0] else None,
            new_tensor(like, shape) if needed[1] else None,
            new_tensor(like, shape) if needed[2] else None,
        )

    return gradients


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


def _product(func: Any) -> Callable[..., Tensor]:
    """Return the rule of ``mm`` or ``addmm``: the left matrix's rows by the right one's columns."""

    def product(*args: Tensor, **scales: Any) -> Tensor:
        *bias, left, right = args
        is_plain = left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]
        is_plain = is_plain and all(added.shape == right.shape[1:] for added in bias)
        if is_plain and all(tensor.dtype is left.dtype for tensor in args):
            return new_tensor(left, [left.shape[0], right.shape[1]])
        output: Tensor = run_on_shapes(func, args, scales)
        return output

    return product


def _col2im(columns: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return an output that keeps a storage of its input's size, even if the output is smaller.

    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Col2Im.cu
    """
    output: Tensor = run_on_shapes(_COL2IM, (columns, *args), kwargs)
    if output.numel() >= columns.numel():
        return output
    whole = new_like(columns, torch.contiguous_format)
    return whole.as_strided(output.shape, output.stride())


def _like(place: int) -> Callable[..., Tensor]:
    """Return the rule of an operator whose output is like one of its arguments."""
    return lambda *args, **_: new_like(args[place])


_aten: Any = torch.ops.aten
_COPIES = {
    _aten._to_copy.default,
    _aten.empty_like.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
}
_COL2IM = _aten.col2im.default
_CONVOLUTION = _aten.convolution.default
_EFFICIENT_ATTENTION = _aten._scaled_dot_product_efficient_attention.default
_OUTPUTS: dict[Any, Callable[..., Any]] = {
    **{func: _product(func) for func in (_aten.mm.default, _aten.addmm.default)},
    _CONVOLUTION: convolution,
    _aten.convolution_backward.default: convolution_backward,
    _aten.native_batch_norm.default: _norm(lambda args: [args[0].size(1) if args[5] else 0]),
    _aten.native_batch_norm_backward.default: _norm_backward(2, _channels),
    _aten.native_layer_norm.default: _norm(_rows, torch.contiguous_format),
    _aten.native_layer_norm_backward.default: _norm_backward(5, lambda args: args[2]),
    _aten.native_group_norm.default: _norm(lambda args: [args[3], args[6]]),
    _aten.native_group_norm_backward.default: _norm_backward(4, _channels),
    _aten.native_dropout.default: lambda values, *_: (
        new_like(values),
        new_like(values, dtype=torch.bool),
    ),
    _aten.native_dropout_backward.default: _like(0),
    _EFFICIENT_ATTENTION: _efficient_attention,
    _COL2IM: _col2im,
    # Only the CPU fills the buffer: ``cuda/ActivationLogSigmoidKernel.cu``.
    _aten.log_sigmoid_forward.default: lambda values: (new_like(values), new_tensor(values, [0])),
    _aten.log_sigmoid_backward.default: _like(1),
    # PyTorch has no shape rule for these.
    _aten.multi_margin_loss_backward.default: _like(1),
    _aten.multilabel_margin_loss_backward.default: _like(1),
    _aten._sample_dirichlet.default: _like(0),
    _aten._dirichlet_grad.default: _like(0),
    _aten._standard_gamma_grad.default: _like(0),
    **LOSSES,
    **PACK,
}
if hasattr(_aten, "_grouped_mm"):  # since 2.8
    _GROUPED_MM = _aten._grouped_mm.default
    _OUTPUTS[_GROUPED_MM] = _grouped_mm

_SELECTIONS = {
    f"{name}Backward{number}"
    for name in ("Max", "Min", "Median", "Nanmedian", "Mode", "Kthvalue", "Sort", "Topk")
    for number in (0, 1)
}
_LOGITS = "BinaryCrossEntropyWithLogitsBackward0"
# Operators that write into their first argument on CUDA, each with the autograd nodes that run it.
# PyTorch copies that argument first if it is a tensor subclass, such as a fake tensor. Source:
# ``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp`` and ``aten/src/ATen``.
_IN_PLACE: dict[Any, set[str]] = {
    _aten.scatter_add.default: {"GatherBackward0", "CummaxBackward0", "CumminBackward0"},
    _aten.index_add.default: {"IndexSelectBackward0"},
    _aten.index_put.default: {"IndexBackward0"},
    _aten.scatter.src: _SELECTIONS,
    _aten.logical_and.default: _SELECTIONS,
    _aten.logical_or.default: _SELECTIONS,
    _aten.sub.Tensor: {_LOGITS},
    _aten.mul.Tensor: {_LOGITS},
}


def outputs_of(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the outputs of an operator, when called below autograd."""
    if _works_in_place(func, args):
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


def _works_in_place(func: Any, args: Any) -> bool:
    """Return True if an operator that is about to run would change its first argument on CUDA."""
    nodes = _IN_PLACE.get(func)
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
