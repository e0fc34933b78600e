"""What is known of the values of tensors without data.

The batch is real, and so is what a step makes of nothing but the batch and numbers: the largest
label, the length of the longest text, which tokens are masked. A step that reads such values, or
picks by them, runs without data too. What comes from parameters is not known, but for what
:mod:`~batchfinder.simulation.values.assumptions` takes for granted.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from batchfinder.simulation.values.assumptions import ASSUMED, drawn, if_finite
from batchfinder.simulation.values.known import MOST_ELEMENTS, let_go, note, value_of
from batchfinder.simulation.values.shapes import new_strided_like, new_tensor

_aten: Any = torch.ops.aten
_NONZERO = _aten.nonzero.default
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
# What they write to without saying so: statistics.
_WRITTEN = {_aten.native_batch_norm.default: ("running_mean", "running_var")}


def outcome(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """What an operator returns that hangs on values, and not on shapes alone.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        A number, or fake tensors; None where it does not hang on values, or they are not known.

    Raises:
        Exception: what PyTorch finds wrong with the values.
    """
    if not _hangs_on_values(func) or (func is _PICK and not _has_mask(args)):
        return None
    mode = next((t.fake_mode for t in _tensors(args) if isinstance(t, FakeTensor)), None)
    values = None if mode is None else _values((args, kwargs))
    if mode is None or values is None:
        return None
    if any(value.numel() > MOST_ELEMENTS for value in _tensors(values)):
        return _places_of_all(args[0], values[0][0]) if func is _NONZERO else None
    result = None
    with no_dispatch(), suppress(NotImplementedError):  # by the CPU, for such a type
        result = func(*values[0], **values[1])

    def stand_in(value: Tensor) -> Tensor:
        fake = new_strided_like(value, mode)
        note(fake, value)
        return fake

    return tree_map_only(Tensor, stand_in, result)


def places(func: OpOverload, args: Any) -> list[Tensor | None] | None:
    """The indices of an operator with what its masks pick in their place, as CUDA finds them first.

    Args:
        func: the operator.
        args: its arguments.

    Returns:
        None where it picks by no mask, or that is not known.

    Raises:
        IndexError: a mask is of another shape than what it picks from.
    """
    if func is not _PICK or not _has_mask(args):
        return None
    found: list[Tensor | None] = []
    for index in args[1]:
        if index is None or index.dtype not in _MASKS:
            found.append(index)
            continue
        _check_mask(index, args[0], len(found))
        columns = outcome(_NONZERO, (index,), {})
        if columns is None:
            return None
        found += columns.unbind(1)
    return found


def _has_mask(args: Any) -> bool:
    return any(index is not None and index.dtype in _MASKS for index in args[1])


def _places_of_all(mask: Tensor, value: Tensor) -> Tensor | None:
    """The places of all elements of a mask, or of none, too many to write down."""
    if not _is_uniform(value):
        return None
    with no_dispatch():
        count = value.numel() if _first_of(value).all() else 0
    return new_tensor(mask, [count, value.dim()], torch.int64)


def _check_mask(mask: Tensor, picked: Tensor, first: int) -> None:
    """Say what PyTorch says of a mask that does not fit the dimensions from the first one on."""
    sizes = picked.shape[first:]
    for place, size in enumerate(mask.shape):
        if place >= len(sizes) or sizes[place] != size:
            raise IndexError(
                f"The shape of the mask {[*mask.shape]} at index {place} does not match the shape "
                f"of the indexed tensor {[*picked.shape]} at index {first + place}"
            )


def follow(func: OpOverload, args: Any, kwargs: Any, output: Any) -> None:
    """Note what is known of the outputs of an operator that ran on fake tensors.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        output: its fake outputs.
    """
    first = args[0] if args else None
    is_unknown = isinstance(first, FakeTensor) and value_of(first) is None  # as most are
    result = None
    if _is_telling(func):
        result = _told(func, args, kwargs, output, is_unknown)
    if result is None and not is_unknown:
        result = _result(func, args, kwargs, output)
    if result is None:
        forget(func, args, kwargs)
        return
    for fake, value in zip(_tensors(output), _tensors(result), strict=False):
        if fake.shape == value.shape and fake.dtype == value.dtype:
            note(fake, value)
        else:
            let_go(fake)


def forget(func: OpOverload, args: Any, kwargs: Any) -> None:
    """Let go of what an operator writes to, as nobody knows what.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
    """
    for position, name in _written(func):
        written = args[position] if position < len(args) else kwargs.get(name)
        for tensor in _tensors(written):
            let_go(tensor)


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
    if not _is_pytorchs(func) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    values = _values((args, kwargs))
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
        return torch.zeros(like.shape, dtype=like.dtype, device="cpu")


def _alike(number: float, like: Tensor) -> Tensor:
    with no_dispatch():
        if like.numel() <= MOST_ELEMENTS:
            return torch.full(like.shape, number, dtype=like.dtype, device="cpu")
        return torch.full((), number, dtype=like.dtype, device="cpu").expand(like.shape)


def _values(arguments: Any) -> Any:
    """The same arguments with values in place of tensors; None if one is not known."""
    values = {}
    for tensor in _tensors(arguments):
        value = value_of(tensor)
        if value is None:
            return None
        values[id(tensor)] = value
    return tree_map_only(Tensor, lambda tensor: values[id(tensor)], arguments)


def _run(func: OpOverload, args: Any, kwargs: Any) -> Any:
    try:
        with no_dispatch():
            return func(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):
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
    if not _is_pytorchs(func) or func._schema.is_mutable:  # which would write to the value alone
        return False
    tags = func.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


@cache
def _is_pytorchs(func: OpOverload) -> bool:
    """Others may be for a GPU alone, or do more than they return."""
    return func.namespace in ("aten", "prims", "prim")


@cache
def _is_telling(func: OpOverload) -> bool:
    return func.overloadpacket in _EMPTIES or func in _FILLS or func in ASSUMED


@cache
def _written(func: OpOverload) -> list[tuple[int, str]]:
    """The arguments that an operator writes to, by position and name."""
    return [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.name in _WRITTEN.get(func, ())
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
