"""Deep copies that also copy functions; ``copy.deepcopy`` shares functions and their contents."""

from __future__ import annotations

import abc
import copy
import functools
from collections import OrderedDict, defaultdict, deque
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.training.state.anatomy import (
    ATOMS,
    attributes_of,
    container_of,
    contents_of,
    is_followed,
    is_users,
    items_of,
    namespaces_of,
    slots_of,
    users_classes,
    wraps_users,
)
from batchfinder.training.state.process_settings import generator

T = TypeVar("T")
_BY_SCHEDULER = "_wrapped_by_lr_sched"
_DICTS = (dict, OrderedDict)


def copied(thing: T, memo: dict[int, Any]) -> T:
    """Copy models, optimizers and functions so that the copy shares nothing with the original.

    Objects that :func:`~batchfinder.training.state.reach.reachable` does not follow, such as
    loggers, are shared.

    Example:
        >>> counter = {"steps": 0}
        >>> def count() -> int:
        ...     counter["steps"] += 1
        ...     return counter["steps"]
        >>> twin = copied(count, {})
        >>> count(), count(), twin()
        (1, 2, 1)
    """
    if type(thing) in ATOMS:
        return thing
    return cast("T", memo[id(thing)] if id(thing) in memo else _copied(thing, memo))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, FunctionType):
        return _function(value, memo) if wraps_users(value) else value
    if isinstance(value, ModuleType):
        return _namespace(vars(value), memo) if is_users(value) else value
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
    if isinstance(value, nn.Module):
        return _module(value, memo)
    if isinstance(value, Tensor) or (generator(value) and not isinstance(value, torch.Generator)):
        return copy.deepcopy(value, memo)
    if container_of(value) is not None:
        return _container(value, memo)
    return _object(value, memo) if is_followed(value) else value


def _function(function: FunctionType, memo: dict[int, Any]) -> Any:
    # Library functions that wrap a user's function share the library's globals.
    known = function.__globals__
    names = vars(_namespace(known, memo)) if is_users(function) else known
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    # super() uses the __class__ cell to find base classes, which are not copied.
    cells = {
        name: cell if name == "__class__" else memo.setdefault(id(cell), CellType())
        for name, cell in closure.items()
    }
    twin = FunctionType(
        function.__code__, names, function.__name__, None, tuple(cells.values()) or None
    )
    memo[id(function)] = twin
    for name, own in cells.items():
        if contents_of(own) == ():
            for content in contents_of(closure[name]):
                own.cell_contents = copied(content, memo)
    for space, named in namespaces_of(function):
        own_names = vars(_namespace(space, memo))
        for name in named & space.keys():
            if own_names[name] is space[name]:
                own_names[name] = copied(space[name], memo)
    twin.__defaults__ = copied(function.__defaults__, memo)
    twin.__kwdefaults__ = copied(function.__kwdefaults__, memo)
    twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
    vars(twin).update({name: copied(value, memo) for name, value in vars(function).items()})
    return twin


def _namespace(names: dict[str, Any], memo: dict[int, Any]) -> ModuleType:
    """Copy a module's globals once for all of its functions, since they may write to them."""
    if id(names) not in memo:
        twin = memo[id(names)] = ModuleType(str(names.get("__name__")))
        vars(twin).update(names)
    return cast("ModuleType", memo[id(names)])


def _module(module: nn.Module, memo: dict[int, Any]) -> Any:
    twin = copy.deepcopy(module, memo)
    # deepcopy shares functions such as hooks, so copy them here.
    for part in twin.modules():
        for held in (vars(part), *(held for held in vars(part).values() if type(held) in _DICTS)):
            for name, value in list(held.items()):
                if isinstance(value, FunctionType | functools.partial):
                    held[name] = copied(value, memo)
    return twin


def _container(container: Any, memo: dict[int, Any]) -> Any:
    kind = container_of(container)
    twin = memo[id(container)] = kind.__new__(type(container))
    if issubclass(kind, deque):
        kind.__init__(twin, (), container.maxlen)
    elif issubclass(kind, defaultdict):
        kind.__init__(twin, container.default_factory)
    if hasattr(container, "__dict__"):
        vars(twin).update(copied(vars(container), memo))
    items = items_of(container)
    if issubclass(kind, dict):
        kind.update(twin, {copied(key, memo): copied(value, memo) for key, value in items})
    elif issubclass(kind, set):
        kind.update(twin, (copied(item, memo) for item in items))
    else:
        kind.extend(twin, (copied(item, memo) for item in items))
    return twin


def _object(value: Any, memo: dict[int, Any]) -> Any:
    if hasattr(type(value), "__deepcopy__"):
        return copy.deepcopy(value, memo)
    # copy.copy() loses attributes of optimizers, and would share the others with the copy.
    is_optimizer = isinstance(value, Optimizer)
    twin: Any = object.__new__(type(value)) if is_optimizer else copy.copy(value)
    memo[id(value)] = twin
    for slot in slots_of(value):
        for content in contents_of(value, slot):
            slot.__set__(twin, copied(content, memo))
    if hasattr(value, "__dict__"):
        for name, attribute in vars(value).items():
            vars(twin)[name] = copied(attribute, memo)
        if is_optimizer and getattr(vars(value).get("step"), _BY_SCHEDULER, False):
            vars(twin)["step"] = _counted_step(twin)
    if users_classes(type(value)):
        object.__setattr__(twin, "__class__", _class(type(value), memo))
    return twin


def _class(cls: type, memo: dict[int, Any]) -> type:
    """Derive a class with copies of the user's methods, since methods can reach objects too.

    Deriving it keeps ``isinstance`` checks true. Classes that react to being derived from (by a
    metaclass or ``__init_subclass__``) are used as they are.
    """
    body: dict[str, Any] = {}
    for base in reversed(users_classes(cls)):
        body.update(attributes_of(base))
    if type(cls) not in (type, abc.ABCMeta) or "__init_subclass__" in body:
        return cls
    key = id(cls.__mro__)  # not id(cls): references to the class itself stay
    if key not in memo:
        marks = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        memo[key] = twin = type(cls)(cls.__name__, (cls,), marks)
        for name, value in body.items():
            own = _attribute(value, memo)
            if own is not value:
                setattr(twin, name, own)
    return cast("type", memo[key])


def _attribute(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return type(value)(copied(value.__func__, memo))
    if isinstance(value, property):
        getter, setter, deleter = copied((value.fget, value.fset, value.fdel), memo)
        return property(getter, setter, deleter)
    if isinstance(value, functools.cached_property):
        own = functools.cached_property(copied(value.func, memo))
        own.attrname = value.attrname
        return own
    return copied(value, memo)


def _counted_step(optimizer: Any) -> Any:
    """Return the ``step`` that a scheduler installs on its optimizer, for a copied optimizer.

    The scheduler's own function refers to the original optimizer.
    https://github.com/pytorch/pytorch/blob/main/torch/optim/lr_scheduler.py
    """

    def counted(*arguments: Any, **options: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *arguments, **options)

    setattr(counted, _BY_SCHEDULER, True)
    return counted
