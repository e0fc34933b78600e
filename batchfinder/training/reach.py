"""What training steps may touch: all that is reachable from models, optimizers and functions.

A step of the user's own reaches more than its arguments: the discriminator of a GAN, the copy of an
EMA, optimizers, counters. Functions hold it in their closures, in the globals that they name, and
in the object that a method belongs to.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_INSTALLED = {"site-packages", "dist-packages"}


def reachable(roots: Iterable[object]) -> Iterator[Any]:
    """All that is reachable from some objects, each thing once.

    Followed are the items of plain containers; the attributes of what has a ``state_dict``
    (modules, optimizers, scalers, schedulers) and of objects of the user's own classes; and what
    the user's functions read: closures, defaults, globals. Data sets are not followed, nor are
    objects of libraries.

    Args:
        roots: where to start.

    Yields:
        The roots and what was found: tensors, containers, modules, functions, the cells of
        closures. What is yielded may be changed only once all has been seen.

    Example:
        >>> teacher = nn.Linear(4, 2)
        >>> def step(model, batch):
        ...     return (model(batch) - teacher(batch)).square().mean()
        >>> [thing for thing in reachable([step]) if isinstance(thing, nn.Module)]
        [Linear(in_features=4, out_features=2, bias=True)]
    """
    # By a stack: users' structures may be deep or cyclic.
    pending = [*roots]
    seen: dict[int, Any] = {}
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        # Held, not just noted: a dead object's id may be given to another.
        seen[id(value)] = value
        yield value
        pending += _held_by(value)


def modules_reached(functions: Iterable[object]) -> dict[nn.Module, str]:
    """The modules that functions reach, each with the name of a variable that holds it.

    The modules inside them are left out.

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
    if isinstance(thing, FunctionType) and is_users(thing):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False)
        inside = [(name, value) for name, cell in cells for value in contents_of(cell)]
        named = globals_named(thing.__code__) & thing.__globals__.keys()
        return [*inside, *((name, thing.__globals__[name]) for name in sorted(named))]
    return thing.items() if type(thing) in CONTAINERS and isinstance(thing, dict) else ()


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor | type):
        return ()
    if type(value) in CONTAINERS:
        return [*value, *value.values()] if isinstance(value, dict) else value
    if isinstance(value, tuple):
        return value
    if isinstance(value, FunctionType | CellType | MethodType | functools.partial):
        return _held_by_callable(value)
    return _held_by_object(value) if hasattr(value, "__dict__") else ()


def _held_by_callable(value: Any) -> Iterable[Any]:
    if isinstance(value, CellType):
        return contents_of(value)
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    if not is_users(value):
        return ()
    named = globals_named(value.__code__) & value.__globals__.keys()
    return [
        *(value.__closure__ or ()),
        value.__defaults__,
        value.__kwdefaults__,
        vars(value),
        *(value.__globals__[name] for name in sorted(named)),
    ]


def _held_by_object(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        # A scripted module keeps these outside its __dict__.
        inside = [value.parameters(recurse=False), value.buffers(recurse=False), value.children()]
        return [vars(value), *(item for items in inside for item in items)]
    if not is_followed(value):
        return ()
    classes = type(value).__mro__ if is_users(value) else ()
    methods = [method for cls in classes for method in vars(cls).values()]
    return [vars(value), *(method for method in methods if isinstance(method, FunctionType))]


def is_followed(value: Any) -> bool:
    """Whether the attributes of an object, which is no module, may change in a training step."""
    if isinstance(value, type | Dataset | DataLoader) or not hasattr(value, "__dict__"):
        return False
    return (
        hasattr(type(value), "state_dict") or is_users(value) or isinstance(value, SimpleNamespace)
    )


def contents_of(cell: CellType) -> tuple[Any, ...]:
    """What a closure's cell holds: one thing, or none yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def globals_named(code: CodeType) -> set[str]:
    """The global names that a function's code reads or binds, and the functions inside it.

    Example:
        >>> sorted(globals_named((lambda: (len, [print for _ in ()])).__code__))
        ['len', 'print']
    """
    names = {step.argval for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= globals_named(constant)
    return names


def is_users(thing: Any) -> bool:
    """Whether a function, or the class of an object, is the user's code, or of batchfinder.

    Code of the standard library and what is installed as a package are others'.
    """
    if isinstance(thing, FunctionType):
        module, file = thing.__module__ or "", thing.__code__.co_filename
    else:
        module = type(thing).__module__
        file = getattr(sys.modules.get(module), "__file__", None) or ""
    top = module.partition(".")[0]
    if top == "batchfinder":
        return True
    if top in sys.stdlib_module_names:
        return False
    is_installed = not _INSTALLED.isdisjoint(Path(file).parts)
    return not is_installed and not file.startswith(_STANDARD_LIBRARY)
