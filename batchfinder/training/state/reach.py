"""Everything that training steps can reach from models, optimizers and functions.

A user's step uses more than its arguments: the discriminator of a GAN, an EMA copy, optimizers,
counters. It reaches them through closures, globals, and the ``self`` of a method.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from batchfinder.training.state.anatomy import (
    ATOMS,
    container_of,
    contents_of,
    is_followed,
    is_users,
    items_of,
    namespaces_of,
    parts_of,
    slots_of,
    users_classes,
    wraps_users,
)
from batchfinder.training.state.process_settings import generator


def reachable(roots: Iterable[object]) -> Iterator[Any]:
    """Yield everything reachable from some objects, once each.

    The search follows:

    - the items of containers, and the hooks and attributes of tensors;
    - the attributes of objects with a ``state_dict`` (modules, optimizers, scalers, schedulers),
      of objects of the user's classes, of these classes, and of objects that hold tensors;
    - everything that the user's functions read: closures, defaults, globals, the user's modules.

    It does not follow objects of libraries. Data sets and loaders yield only random generators.

    Do not change any of the things found before the iteration ends.

    Example:
        >>> teacher = nn.Linear(4, 2)
        >>> def step(model, batch):
        ...     return (model(batch) - teacher(batch)).square().mean()
        >>> [thing for thing in reachable([step]) if isinstance(thing, nn.Module)]
        [Linear(in_features=4, out_features=2, bias=True)]
    """
    # A stack instead of recursion: users' structures may be deep or cyclic.
    pending = [*roots]
    seen: dict[int, Any] = {}
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        # Keep the object alive: another object could get its id.
        seen[id(value)] = value
        yield value
        pending += [held for held in _held_by(value) if type(held) not in ATOMS]


def modules_reached(functions: Iterable[object]) -> dict[nn.Module, str]:
    """Return the outermost modules that functions reach, each with the name of its variable.

    Example:
        >>> teacher = nn.Sequential(nn.Linear(4, 2))
        >>> modules_reached([lambda model, batch: teacher(batch)])
        {Sequential(
          (0): Linear(in_features=4, out_features=2, bias=True)
        ): 'teacher'}
    """
    names: dict[nn.Module, str] = {}
    modules: list[nn.Module] = []
    for thing in reachable(functions):
        if isinstance(thing, nn.Module):
            modules.append(thing)
        for name, value in _variables_of(thing):
            if isinstance(value, nn.Module):
                names.setdefault(value, str(name))
    inner = {module for outer in modules for module in outer.modules() if module is not outer}
    return {
        module: names.get(module, type(module).__name__)
        for module in modules
        if module not in inner
    }


def _variables_of(thing: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(thing, FunctionType) and wraps_users(thing):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False)
        inside = [(name, value) for name, cell in cells for value in contents_of(cell)]
        named = [(space, name) for space, names in namespaces_of(thing) for name in sorted(names)]
        return [*inside, *((name, space[name]) for space, name in named if name in space)]
    return items_of(thing) if isinstance(thing, dict) else ()


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor):
        # Attributes from a library or the user, such as the scales of a quantized weight.
        own = {} if hasattr(value, "__tensor_flatten__") else vars(value)
        return [*tensor_hooks(value), *([own] if own else ())]
    if isinstance(value, type):
        return [part for cls in users_classes(value) for part in parts_of(cls)]
    if isinstance(value, tuple):
        return value
    if isinstance(value, FunctionType | CellType | MethodType | functools.partial):
        return _held_by_callable(value)
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    if container_of(value) is not None:
        items = items_of(value)
        inside = [part for pair in items for part in pair] if isinstance(value, dict) else items
        return [*inside, vars(value)] if hasattr(value, "__dict__") else inside
    return _held_by_object(value)


def tensor_hooks(tensor: Tensor) -> list[dict[int, Any]]:
    """Return the hooks on a tensor's gradient: before and after accumulation."""
    return [tensor._backward_hooks or {}, tensor._post_accumulate_grad_hooks or {}]


def hooks_of(model: nn.Module) -> list[Any]:
    """Return the hooks of a model's modules and parameters."""
    of_modules = [
        hooks
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and isinstance(hooks, dict)
    ]
    of_tensors = [hooks for tensor in model.parameters() for hooks in tensor_hooks(tensor)]
    return [hook for hooks in (*of_modules, *of_tensors) for hook in hooks.values()]


def methods_of(model: nn.Module) -> list[Any]:
    """Return the methods and data of the user's module classes.

    Only these reach a global that a forward pass uses, such as a table cached for each length.
    """
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if is_users(cls)}
    return [part for cls in classes for part in parts_of(cls)]


def _held_by_callable(value: Any) -> Iterable[Any]:
    if isinstance(value, CellType):
        return contents_of(value)
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if not wraps_users(value):
        return ()
    return [
        *(value.__closure__ or ()),
        value.__defaults__,
        value.__kwdefaults__,
        vars(value),
        *(space[name] for space, names in namespaces_of(value) for name in names & space.keys()),
    ]


def _held_by_object(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        # Scripted modules keep these outside of their __dict__.
        inside = [value.parameters(recurse=False), value.buffers(recurse=False), value.children()]
        return [vars(value), *(item for items in inside for item in items)]
    if isinstance(value, Dataset | DataLoader):
        return random_in(value)
    if not is_followed(value):
        return ()
    slots = [content for slot in slots_of(value) for content in contents_of(value, slot)]
    return [*slots, *([vars(value)] if hasattr(value, "__dict__") else ()), type(value)]


def random_in(data: Any) -> Iterator[Any]:
    """Yield the random generators of data and its transforms, and the data sets that it wraps.

    Examples are not looked at: there may be millions.

    Example:
        >>> import torch
        >>> loader = DataLoader([1, 2], shuffle=True, generator=torch.Generator())
        >>> {*random_in(loader)} == {loader.generator}
        True
    """
    for part in getattr(data, "__dict__", {}).values():
        if isinstance(part, Dataset | DataLoader) or generator(part):
            yield part
        elif hasattr(part, "__dict__"):
            yield from (inner for inner in vars(part).values() if generator(inner))
