"""Follow the known values of tensors through a step without data.

The values of the batch are known, and so is everything that depends only on the batch and on
numbers: the largest label, the length of the longest text, the mask. A step may read such values
or index with them. Values that depend on parameters are unknown, except for those that
:mod:`~batchfinder.simulation.values.assumptions` provides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, partial
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
from batchfinder.simulation.values.unknown import has_unknown

_aten: Any = torch.ops.aten
_NONZERO = _aten.nonzero.default
_PICK = _aten.index.Tensor
# Their result depends only on the shape of their tensor.
_FILLS = {
    getattr(_aten, name).default
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
}
# Their result is undefined. Zeros will do, because no correct code reads it.
_EMPTIES = {
    getattr(_aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
_MASKS = (torch.bool, torch.uint8)
# Beside pointwise operators, these are as well known from elements that stand for others.
_SUM_UP_OR_COPY = {getattr(_aten, name).default for name in ("all", "any", "clone", "_to_copy")}
# Arguments that operators write to without declaring it: running statistics.
_WRITTEN = {_aten.native_batch_norm.default: ("running_mean", "running_var")}


def outcome(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator whose output shape or number depends on values.

    Returns:
        A number, or fake tensors; None if values do not matter here, or are unknown.

    Raises:
        Exception: PyTorch's error if the values are invalid.
    """
    if not _depends_on_values(func) or (func is _PICK and not _has_mask(args)):
        return None
    mode = next((t.fake_mode for t in _tensors(args) if isinstance(t, FakeTensor)), None)
    values = None if mode is None else _values((args, kwargs))
    if mode is None or values is None:
        return None
    if any(value.numel() > MOST_ELEMENTS for value in _tensors(values)):
        return _places_of_all(args[0], values[0][0]) if func is _NONZERO else None
    result = None
    with no_dispatch(), suppress(NotImplementedError):  # the CPU lacks some dtypes
        result = func(*values[0], **values[1])

    def stand_in(value: Tensor) -> Tensor:
        fake = new_strided_like(value, mode)
        note(fake, value)
        return fake

    return tree_map_only(Tensor, stand_in, result)


def places(func: OpOverload, args: Any) -> list[Tensor | None] | None:
    """Replace the masks among an operator's indices by integer indices, as CUDA does first.

    Returns:
        All indices; None if there is no mask, or if its values are unknown.

    Raises:
        IndexError: a mask does not have the shape of the indexed tensor.
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
    """Return the indices of a large mask that is all true or all false."""
    with no_dispatch():
        one = _without_repeats(value)
        if one.numel() != 1:
            return None
        count = value.numel() if one.all() else 0
    return new_tensor(mask, [count, value.dim()], torch.int64)


def _check_mask(mask: Tensor, picked: Tensor, first: int) -> None:
    """Raise PyTorch's error for a mask that does not fit the dimensions from ``first`` on."""
    sizes = picked.shape[first:]
    for place, size in enumerate(mask.shape):
        if place >= len(sizes) or sizes[place] != size:
            raise IndexError(
                f"The shape of the mask {[*mask.shape]} at index {place} does not match the shape "
                f"of the indexed tensor {[*picked.shape]} at index {first + place}"
            )


def follow(func: OpOverload, args: Any, kwargs: Any, output: Any) -> None:
    """Record the known values of the outputs of an operator that ran on fake tensors."""
    first = args[0] if args else None
    is_unknown = isinstance(first, FakeTensor) and value_of(first) is None
    result = None
    if func.overloadpacket in _EMPTIES or func in _FILLS or func in ASSUMED:
        result = _implied(func, args, kwargs, output, is_unknown)
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
    """Drop the values of all tensors that an operator writes to."""
    for position, name in _written(func):
        written = args[position] if position < len(args) else kwargs.get(name)
        for tensor in _tensors(written):
            let_go(tensor)


def _implied(func: OpOverload, args: Any, kwargs: Any, output: Any, is_unknown: bool) -> Any:
    """Return output values that do not depend on the values of the operator's tensor."""
    if func.overloadpacket in _EMPTIES:
        return _zeros(output)
    if func in _FILLS:
        zeros = _zeros(args[0])
        return None if zeros is None else _result(func, (zeros, *args[1:]), kwargs, output)
    number = drawn(func, args)
    if number is not None:
        return _filled(number, output) if output.numel() == 1 else None
    verdict = if_finite(func, args) if is_unknown else None
    return None if verdict is None else _filled(verdict, output)


def _result(func: OpOverload, args: Any, kwargs: Any, output: Any) -> Any:
    """Return the values of an operator's outputs; None if they are unknown."""
    if not _is_builtin(func) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    values = _values((args, kwargs))
    if has_unknown(func, args, () if values is None else values[0]) or values is None:
        return None
    if func._schema.is_mutable and any(map(_stands_for_more, _tensors(args[:1]))):
        with no_dispatch():  # written to one of them, it stands for no other any more
            values = tree_map_only(Tensor, torch.clone, values)
    are_few = all(part.numel() <= MOST_ELEMENTS for part in _tensors((output, values)))
    if are_few or func.is_view:
        return _run(func, *values)
    # Larger tensors: where elements are equal along a dimension, the first stands for all of them.
    one_by_one = torch.Tag.pointwise in func.tags or func in _SUM_UP_OR_COPY
    if not one_by_one or func._schema.is_mutable:
        return None
    with no_dispatch():
        few = _without_repeats(values)
        shapes = (part.shape for part in _tensors(few))
        if math.prod(torch.broadcast_shapes(*shapes)) > MOST_ELEMENTS:  # type: ignore[no-untyped-call]
            return None
        result = _run(func, *few)
        return None if result is None else result.expand(output.shape)


def _zeros(like: Tensor) -> Tensor | None:
    if like.numel() > MOST_ELEMENTS:
        return None
    with no_dispatch():
        return torch.zeros(like.shape, dtype=like.dtype, device="cpu")


def _filled(number: float, like: Tensor) -> Tensor:
    with no_dispatch():
        if like.numel() <= MOST_ELEMENTS:
            return torch.full(like.shape, number, dtype=like.dtype, device="cpu")
        return torch.full((), number, dtype=like.dtype, device="cpu").expand(like.shape)


def _values(arguments: Any) -> Any:
    """Return the arguments with values in place of tensors; None if one is unknown."""
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
        return None  # the step itself will raise the error


def _without_repeats(values: Any) -> Any:
    """Shorten to 1 the dimensions along which no tensor varies, counted from the last one."""
    tensors = _tensors(values)
    for place in range(1, 1 + max((part.dim() for part in tensors), default=0)):
        if not any(_varies(part, part.dim() - place) for part in tensors):
            values = tree_map_only(Tensor, partial(_shortened, place=place), values)
    return values


def _shortened(value: Tensor, place: int) -> Tensor:
    return value.narrow(-place, 0, 1) if place <= value.dim() else value


def _varies(value: Tensor, dim: int) -> bool:
    """Return True if elements differ along a dimension; those of a repeated one do not."""
    if dim < 0 or value.shape[dim] <= 1 or value.stride(dim) == 0:
        return False
    for repeated, stride in enumerate(value.stride()):
        value = value.narrow(repeated, 0, 1) if stride == 0 else value
    return value.numel() > MOST_ELEMENTS or not bool((value == value.narrow(dim, 0, 1)).all())


def _stands_for_more(tensor: Tensor) -> bool:
    """Return True if elements of a value stand for several of the tensor's, by their storages."""
    value = value_of(tensor)
    known = 0 if value is None else value.untyped_storage().nbytes()
    return 0 < known < tensor.untyped_storage().nbytes()


def _tensors(arguments: Any) -> Iterable[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


@cache
def _depends_on_values(func: OpOverload) -> bool:
    # A mutable operator would write to the value and not to the fake tensor.
    if not _is_builtin(func) or func._schema.is_mutable:
        return False
    tags = func.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


@cache
def _is_builtin(func: OpOverload) -> bool:
    """Return True for PyTorch's own operators; others may need a GPU or have side effects."""
    return func.namespace in ("aten", "prims", "prim")


@cache
def _written(func: OpOverload) -> list[tuple[int, str]]:
    """Return the position and name of each argument that an operator writes to."""
    return [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.name in _WRITTEN.get(func, ())
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
