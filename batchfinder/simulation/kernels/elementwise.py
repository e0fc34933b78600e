"""The outputs of elementwise operators, in the simple cases.

PyTorch derives the same with a reference implementation in Python, which needs ten times as long.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from batchfinder.simulation.values.shapes import new_like

_aten: Any = torch.ops.aten
# The type of their outputs is the promoted type of their inputs, unlike in comparisons.
ELEMENTWISE = {
    getattr(getattr(_aten, name), overload)
    for overload, names in {
        "Tensor": "add sub mul div",
        "Scalar": "add sub mul div",
        "Tensor_Scalar": "pow",
        "default": """
            neg exp sqrt rsqrt reciprocal tanh sigmoid relu silu gelu hardtanh hardswish
            hardsigmoid leaky_relu elu softplus clone tanh_backward sigmoid_backward
            threshold_backward silu_backward gelu_backward hardtanh_backward hardswish_backward
            hardsigmoid_backward leaky_relu_backward elu_backward softplus_backward
            """,
    }.items()
    for name in names.split()
}


def elementwise(args: Any, kwargs: Any) -> Tensor | None:
    """Return the output of one of :data:`ELEMENTWISE`; None if the case is not simple."""
    if kwargs.keys() - {"alpha", "approximate"}:
        return None
    operands = [argument for argument in args if isinstance(argument, Tensor)]
    if not operands or not all(map(_is_plain, operands)):
        return None
    widest = max(operands, key=Tensor.numel)
    layout = _layout(widest)
    if layout is None or not all(_follows(operand, widest, layout) for operand in operands):
        return None
    # One dtype is not promoted: promote_types is an operator itself.
    dtype = functools.reduce(torch.promote_types, {operand.dtype for operand in operands})
    return new_like(widest, layout, dtype)


def _is_plain(operand: Tensor) -> bool:
    is_fake = isinstance(operand, FakeTensor) and operand.constant is None
    return is_fake and operand.is_floating_point() and operand.dim() > 0


def _follows(operand: Tensor, widest: Tensor, layout: torch.memory_format) -> bool:
    """Return True if an operand leaves the layout of the output to the widest operand."""
    if operand.shape == widest.shape:
        return operand.stride() == widest.stride() or _layout(operand) is layout
    if operand.dim() > widest.dim() or layout is not torch.contiguous_format:
        return False
    # Expanded over the first dimensions, like a bias, or over others, like a norm's factors.
    sides = zip(reversed(operand.shape), reversed(widest.shape), strict=False)
    return all(own in (1, whole) for own, whole in sides) and operand.is_contiguous()


def cast(
    input: Tensor,  # noqa: A002
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> Tensor:
    """Return the output of ``aten::_to_copy`` or a similar operator, on the simulated device."""
    return new_like(input, memory_format or torch.preserve_format, dtype)


def is_plain_cast(kwargs: Any) -> bool:
    """Return True if ``aten::_to_copy`` or a similar one changes only dtype and memory format."""
    device, layout = kwargs.get("device"), kwargs.get("layout")
    return (device is None or device.type == "cpu") and layout in (None, torch.strided)


def _layout(tensor: Tensor) -> torch.memory_format | None:
    """Return the memory format with the tensor's dimension order; it may have holes."""
    sides = [side for side, size in enumerate(tensor.shape) if size != 1]
    strides = tensor.stride()
    if _descends([strides[side] for side in sides]):
        return torch.contiguous_format
    if tensor.dim() == 4 and 1 in sides:
        sides.remove(1)
        if _descends([strides[side] for side in (*sides, 1)]):
            return torch.channels_last
    return None


def _descends(strides: list[int]) -> bool:
    """Return True if each stride is smaller than the one before. Expanded tensors fail this."""
    return 0 not in strides and all(after < before for before, after in pairwise(strides))
