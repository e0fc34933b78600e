"""Deep copies that take functions along, which ``copy.deepcopy`` shares with all that they hold."""

from __future__ import annotations

import copy
import functools
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.training.reach import CONTAINERS, contents_of, globals_named, is_followed, is_users

T = TypeVar("T")
_BY_SCHEDULER = "_wrapped_by_lr_sched"


def copied(thing: T, memo: dict[int, Any]) -> T:
    """A copy of models, optimizers and functions that has nothing in common with the original.

    As far as :func:`~batchfinder.training.reach.reachable` follows them: loggers, say, are shared.

    Args:
        thing: also a container of such things.
        memo: as of ``copy.deepcopy``: copies that are there already, by the id of the original.

    Raises:
        Exception: what ``copy.deepcopy`` raises of models and optimizers.

    Example:
        >>> counter = {"steps": 0}
        >>> def count() -> int:
        ...     counter["steps"] += 1
        ...     return counter["steps"]
        >>> twin = copied(count, {})
        >>> count(), count(), twin()
        (1, 2, 1)
    """
    return cast("T", memo[id(thing)] if id(thing) in memo else _copied(thing, memo))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, FunctionType):
        return _function(value, memo) if is_users(value) else value
    if isinstance(value, MethodType):
        return MethodType(copied(value.__func__, memo), copied(value.__self__, memo))
    if isinstance(value, functools.partial):
        function, arguments, options = value.func, value.args, value.keywords
        return functools.partial(
            copied(function, memo), *copied(arguments, memo), **copied(options, memo)
        )
    if isinstance(value, tuple):
        items = [copied(item, memo) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if type(value) in CONTAINERS:
        return _container(value, memo)
    if isinstance(value, Tensor | nn.Module):
        return copy.deepcopy(value, memo)
    return _object(value, memo) if is_followed(value) else value


def _function(function: FunctionType, memo: dict[int, Any]) -> Any:
    known = function.__globals__
    # Shared by the functions of a module, as they may write to it.
    names = memo.setdefault(id(known), {**known})
    cells = [memo.setdefault(id(cell), CellType()) for cell in function.__closure__ or ()]
    twin = FunctionType(function.__code__, names, function.__name__, None, tuple(cells) or None)
    memo[id(function)] = twin
    for cell, own in zip(function.__closure__ or (), cells, strict=True):
        if contents_of(own) == ():
            for content in contents_of(cell):
                own.cell_contents = copied(content, memo)
    for name in globals_named(function.__code__) & known.keys():
        if names[name] is known[name]:
            names[name] = copied(known[name], memo)
    twin.__defaults__ = copied(function.__defaults__, memo)
    twin.__kwdefaults__ = copied(function.__kwdefaults__, memo)
    twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
    vars(twin).update({name: copied(value, memo) for name, value in vars(function).items()})
    return twin


def _container(container: Any, memo: dict[int, Any]) -> Any:
    twin = memo[id(container)] = copy.copy(container)
    items = list(container.items()) if isinstance(container, dict) else list(container)
    twin.clear()
    if isinstance(container, dict):
        twin.update({copied(key, memo): copied(value, memo) for key, value in items})
    elif isinstance(container, set):
        twin.update(copied(item, memo) for item in items)
    else:
        twin.extend(copied(item, memo) for item in items)
    return twin


def _object(value: Any, memo: dict[int, Any]) -> Any:
    if hasattr(type(value), "__deepcopy__"):
        return copy.deepcopy(value, memo)
    # Optimizers hide attributes from copy, and change what they share with their copies.
    is_optimizer = isinstance(value, Optimizer)
    twin: Any = object.__new__(type(value)) if is_optimizer else copy.copy(value)
    memo[id(value)] = twin
    for name, attribute in vars(value).items():
        vars(twin)[name] = copied(attribute, memo)
    if is_optimizer and getattr(vars(value).get("step"), _BY_SCHEDULER, False):
        vars(twin)["step"] = _counted_step(twin)
    return twin


def _counted_step(optimizer: Any) -> Any:
    """What a scheduler puts before its optimizer's ``step``; the original holds its optimizer.

    https://github.com/pytorch/pytorch/blob/main/torch/optim/lr_scheduler.py
    """

    def counted(*arguments: Any, **options: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *arguments, **options)

    setattr(counted, _BY_SCHEDULER, True)
    return counted
