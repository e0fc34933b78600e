"""What is known of the values of tensors without data.

The batch is real, and so is what a step makes of nothing but the batch and numbers: the largest
label, the length of the longest text, which tokens are masked. A step that reads such values, or
picks by them, runs without data too. What comes from parameters is not known, but for what
:mod:`~batchfinder.simulation.assumptions` takes for granted.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from batchfinder.simulation.assumptions import ASSUMED, drawn, if_finite
from batchfinder.simulation.shapes import new_strided_like

MOST_ELEMENTS = 1 << 22
"""Larger values are let go: to compute with them would take longer than the trace."""

_aten: Any = torch.ops.aten
_PICK = _aten.index.Tensor
# What they return hangs on the shape of their tensor alone, not on its values.
_FILLS = {
    getattr(_aten, name).default
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
}
# Whatever the memory held: as good as zeros, since nobody reads it before it is written.
_EMPTIES = {
    getattr(_aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
_MASKS = (torch.bool, torch.uint8)
_SUM_UP = {_aten.all.default, _aten.any.default}


class _Cell:
    """Whether the values in a storage still hold; shared by all that look at it."""

    __slots__ = ("holds",)

    def __init__(self) -> None:
        self.holds = True


class _Known:
    """The value of a fake tensor, and the cell of the value's storage."""

    __slots__ = ("cell", "value")

    def __init__(self, value: Tensor, cell: _Cell | None = None) -> None:
        self.value = value
        self.cell = cell or _Cell()

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copy has a storage of its own: let it be unknown


def know(tensor: Tensor, value: Tensor) -> None:
    """Note the value of a fake tensor, unless it is too large.

    Args:
        tensor: a fake one.
        value: of the same shape and type; it is copied.
    """
    known = _copied(value)
    if known is not None:
        vars(tensor)["_known"] = known


def numbers_of(tensor: Tensor) -> list[Any] | None:
    """The values of a tensor, as Python's; None if they are not known."""
    known = _known(tensor)
    if known is None:
        return None
    with no_dispatch():
        numbers: list[Any] = known.value.tolist()
        return numbers


def outcome(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """What an operator returns that hangs on values, and not on shapes alone.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        A number, or fake tensors; None where it does not hang on values, or they are not known.
    """
    if not _hangs_on_values(func):
        return None
    values = _values((args, kwargs))
    result = None if values is None else _run(func, *values)
    mode = next((t.fake_mode for t in _tensors(args) if isinstance(t, FakeTensor)), None)
    if mode is None:
        return None

    def stand_in(value: Tensor) -> Tensor:
        fake = new_strided_like(value, mode)
        vars(fake)["_known"] = _Known(value)
        return fake

    return tree_map_only(Tensor, stand_in, result)


def places(func: OpOverload, args: Any) -> list[Tensor | None] | None:
    """The indices of an operator with what its masks pick in their place, as CUDA finds them first.

    Args:
        func: the operator.
        args: its arguments.

    Returns:
        None where it picks by no mask, or that is not known.
    """
    if func is not _PICK:
        return None
    if not any(index is not None and index.dtype in _MASKS for index in args[1]):
        return None
    found: list[Tensor | None] = []
    for index in args[1]:
        if index is None or index.dtype not in _MASKS:
            found.append(index)
            continue
        columns = outcome(_aten.nonzero.default, (index,), {})
        if columns is None:
            return None
        found += columns.unbind(1)
    return found


def follow(func: OpOverload, args: Any, kwargs: Any, output: Any) -> None:
    """Note what is known of the outputs of an operator that ran on fake tensors.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        output: its fake outputs.
    """
    first = args[0] if args else None
    is_unknown = isinstance(first, FakeTensor) and _known(first) is None  # as most are
    result = None
    if _is_telling(func):
        result = _told(func, args, kwargs, output, is_unknown)
    if result is None and not is_unknown:
        result = _result(func, args, kwargs, output)
    if result is None:
        _forget(func, args, kwargs)
        return
    known = [_known(tensor) for tensor in _tensors((args, kwargs))]
    cells = {one.value.untyped_storage()._cdata: one.cell for one in known if one is not None}
    for fake, value in zip(_tensors(output), _tensors(result), strict=False):
        if fake.shape == value.shape and fake.dtype == value.dtype:
            vars(fake)["_known"] = _Known(value, cells.get(value.untyped_storage()._cdata))


def _told(func: OpOverload, args: Any, kwargs: Any, output: Any, is_unknown: bool) -> Any:
    """The values of an operator's output that do not hang on those of its tensor."""
    if func.overloadpacket in _EMPTIES:
        return _zeros(output)
    if func in _FILLS:
        zeros = _zeros(args[0])
        return None if zeros is None else _result(func, (zeros, *args[1:]), kwargs, output)
    number = drawn(func, args)
    if number is not None:
        return _alike(number, output) if output.numel() == 1 else None
    told = if_finite(func, args) if is_unknown else None
    return None if told is None else _alike(told, output)


def _result(func: OpOverload, args: Any, kwargs: Any, output: Any) -> Any:
    """The values of an operator's outputs; None if they are not known."""
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    values = None if is_random else _values((args, kwargs))
    if values is None:
        return None
    if all(part.numel() <= MOST_ELEMENTS for part in _tensors((output, values))):
        return _run(func, *values)
    # Else only where a single element tells all of them.
    one_by_one = torch.Tag.pointwise in func.tags or func in _SUM_UP
    if not one_by_one or func._schema.is_mutable or not all(map(_is_uniform, _tensors(values))):
        return None
    with no_dispatch():
        result = _run(func, *tree_map_only(Tensor, _first_of, values))
        return None if result is None else result.expand(output.shape)


def _zeros(like: Tensor) -> Tensor | None:
    if like.numel() > MOST_ELEMENTS:
        return None
    with no_dispatch():
        return torch.zeros(like.shape, dtype=like.dtype)


def _alike(number: float, like: Tensor) -> Tensor:
    with no_dispatch():
        return torch.full((), number, dtype=like.dtype).expand(like.shape)


def _forget(func: OpOverload, args: Any, kwargs: Any) -> None:
    """What an operator writes to, with unknown values, is not known any more."""
    for position, name in _written(func):
        written = args[position] if position < len(args) else kwargs.get(name)
        for tensor in _tensors(written):
            known = vars(tensor).get("_known")
            if known is not None:
                known.cell.holds = False


def _known(tensor: Tensor) -> _Known | None:
    if isinstance(tensor, FakeTensor):
        known: _Known | None = vars(tensor).get("_known")
        return known if known is not None and known.cell.holds else None
    return _copied(tensor)


def _copied(value: Tensor) -> _Known | None:
    """A real tensor's value, apart from it: the user's own is never written to."""
    plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    if not plain or value.is_meta or value.numel() > MOST_ELEMENTS:
        return None
    with no_dispatch():
        return _Known(value.detach().to("cpu", copy=True))


def _values(arguments: Any) -> Any:
    """The same arguments with values in place of tensors; None if one is not known."""
    values = {}
    for tensor in _tensors(arguments):
        known = _known(tensor)
        if known is None:
            return None
        values[id(tensor)] = known.value
    return tree_map_only(Tensor, lambda tensor: values[id(tensor)], arguments)


def _run(func: OpOverload, args: Any, kwargs: Any) -> Any:
    try:
        with no_dispatch():
            return func(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return None  # what is wrong with it is told by the step, not by its shadow


def _is_uniform(value: Tensor) -> bool:
    strides = zip(value.shape, value.stride(), strict=True)
    return all(stride == 0 or size == 1 for size, stride in strides)


def _first_of(value: Tensor) -> Tensor:
    # Not of dimension 0, unless it was: such a tensor gives way to the types of others.
    return value.as_strided((1,), (0,)) if value.dim() else value


def _tensors(arguments: Any) -> Iterable[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


@cache
def _hangs_on_values(func: OpOverload) -> bool:
    tags = func.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


@cache
def _is_telling(func: OpOverload) -> bool:
    return func.overloadpacket in _EMPTIES or func in _FILLS or func in ASSUMED


@cache
def _written(func: OpOverload) -> list[tuple[int, str]]:
    """The arguments that an operator writes to, by position and name."""
    return [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
