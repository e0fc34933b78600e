"""The parts of objects, classes, containers and functions, and which of them are user code."""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import os
import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

# Container types whose items are followed and restored; also their subclasses.
CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
# Types that are not followed. They refer to nothing else, and a list may have millions of them.
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
Slot: TypeAlias = MemberDescriptorType | GetSetDescriptorType
CELL: Slot = vars(CellType)["cell_contents"]
"""The one slot of a closure's cell."""
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_BATCHFINDER = str(Path(__file__).parents[2]) + os.sep
_INSTALLED = {"site-packages", "dist-packages"}


def tensors_of(owner: nn.Module | Tensor) -> list[Tensor]:
    """Return the parameters and buffers of a module, or the tensor itself."""
    return [owner] if isinstance(owner, Tensor) else [*owner.parameters(), *owner.buffers()]


def is_followed(value: Any) -> bool:
    """Return True if a training step may change the attributes of an object (not of a module)."""
    if isinstance(value, type | ModuleType | Dataset | DataLoader):
        return False
    if not isinstance(type(value).__module__, str):
        return False  # a function from Cython 3.1, such as those of NumPy 2.2
    if not hasattr(value, "__dict__"):
        return bool(slots_of(value))
    return (
        hasattr(type(value), "state_dict")
        or is_users(value)
        or isinstance(value, SimpleNamespace)
        or holds_tensors(value)
    )


def holds_tensors(value: Any) -> bool:
    """Return True if an object has tensors in its attributes, or annotates some as tensors.

    An example is the object with the scales of a quantized weight, which a step may replace.
    """
    cls: Any = type(value)
    return _names_tensors(cls) or any(isinstance(part, Tensor) for part in vars(value).values())


@functools.cache
def _names_tensors(cls: Any) -> bool:
    return any("Tensor" in str(kind) for kind in getattr(cls, "__annotations__", {}).values())


def container_of(value: Any) -> Any:
    """Return the container type that an object is or inherits from; None for other objects.

    Example:
        >>> container_of(Counter()), container_of((1, 2))
        (<class 'collections.Counter'>, None)
    """
    return next((base for base in type(value).__mro__ if base in CONTAINERS), None)


def items_of(container: Any) -> list[Any]:
    """Return the items of a container (pairs for a dict), even if its class overrides iteration."""
    kind = container_of(container)
    return list(kind.items(container) if issubclass(kind, dict) else kind.__iter__(container))


def slots_of(value: Any) -> list[MemberDescriptorType]:
    """Return the ``__slots__`` of an object of a user's class."""
    return [
        slot
        for cls in users_classes(type(value))
        if "__slots__" in vars(cls)  # members of classes in C may be read-only
        for slot in vars(cls).values()
        if isinstance(slot, MemberDescriptorType)
    ]


def contents_of(owner: Any, slot: Slot = CELL) -> tuple[Any, ...]:
    """Return the content of an object's slot, or of a closure's cell, if any, in a tuple."""
    try:
        return (slot.__get__(owner),)
    except (AttributeError, ValueError):  # ValueError: a cell
        return ()


def users_classes(cls: type) -> tuple[type, ...]:
    """Return the user's own classes among a class and its bases.

    Modules and tensors are handled elsewhere. Data sets, loaders and enums do not change.
    """
    if issubclass(cls, nn.Module | Tensor | Dataset | DataLoader | enum.Enum):
        return ()
    own = (base for base in cls.__mro__ if not base.__module__.startswith("batchfinder."))
    return tuple(base for base in own if is_users(base))


def attributes_of(cls: type) -> dict[str, Any]:
    """Return a class's own methods, properties and data, without slots, ``__doc__`` and the like.

    Example:
        >>> class Loop:
        ...     steps = 0
        ...     def __call__(self): ...
        >>> list(attributes_of(Loop))
        ['steps', '__call__']
    """
    functions = (FunctionType, staticmethod, classmethod, property)
    return {
        name: value
        for name, value in vars(cls).items()
        if isinstance(value, functions)
        or not (name.startswith("__") or isinstance(value, MemberDescriptorType))
    }


def parts_of(cls: type) -> Iterator[Any]:
    """Yield a class's own functions and data, without wrappers such as ``property``."""
    for value in attributes_of(cls).values():
        if isinstance(value, staticmethod | classmethod):
            yield value.__func__
        elif isinstance(value, property):
            yield from (value.fget, value.fset, value.fdel)
        elif isinstance(value, functools.cached_property):
            yield value.func
        else:
            yield value


def namespaces_of(function: FunctionType) -> list[tuple[dict[str, Any], frozenset[str]]]:
    """Return the namespaces that a user's function reads: its globals and the user's modules.

    Each comes with the names that the function may look up there.
    """
    if not is_users(function):
        return []
    spaces = [(function.__globals__, globals_named(function.__code__))]
    read = [content for cell in function.__closure__ or () for content in contents_of(cell)]
    attributes = _names_in(function.__code__)
    seen = {id(function.__globals__)}
    for space, names in spaces:
        read += [space[name] for name in names & space.keys()]
        for module in (thing for thing in read if isinstance(thing, ModuleType)):
            if id(vars(module)) not in seen and is_users(module):
                seen.add(id(vars(module)))
                spaces.append((vars(module), attributes))
        read = []
    return spaces


@functools.cache
def globals_named(code: CodeType) -> frozenset[str]:
    """Return the global names that a function, or a function inside it, reads or binds.

    Example:
        >>> sorted(globals_named((lambda: (len, [print for _ in ()])).__code__))
        ['len', 'print']
    """
    names = {step.argval for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")}
    return frozenset(names.union(*map(globals_named, _codes_in(code))))


@functools.cache
def _names_in(code: CodeType) -> frozenset[str]:
    """Return all names in a function's code: globals, attributes, imports."""
    return frozenset(code.co_names).union(*map(_names_in, _codes_in(code)))


def _codes_in(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def wraps_users(function: FunctionType) -> bool:
    """Return True for a user's function, also if a library's decorator wraps it."""
    return is_users(function) or is_users(inspect.unwrap(function))


def is_users(thing: Any) -> bool:
    """Return True if a function, module, class, or an object's class, is user code.

    Batchfinder's objects and closures count as user code, because they refer to it. Its other
    functions, the standard library and installed packages do not.
    """
    if isinstance(thing, ModuleType):
        names = variables_of(thing)
        return _is_users_file(str(names.get("__name__")), str(names.get("__file__") or ""))
    if isinstance(thing, FunctionType):
        if not thing.__closure__ and thing.__code__.co_filename.startswith(_BATCHFINDER):
            return False  # batchfinder's functions refer to user objects only in closures
        return _is_users_file(thing.__module__ or "", thing.__code__.co_filename)
    module = thing.__module__ if isinstance(thing, type) else type(thing).__module__
    return _is_users_file(module, getattr(sys.modules.get(module), "__file__", None) or "")


def variables_of(module: ModuleType) -> dict[str, Any]:
    """Return the variables of a module, without triggering a lazy module to load."""
    names: dict[str, Any] = ModuleType.__getattribute__(module, "__dict__")
    return names


@functools.cache
def _is_users_file(module: str, file: str) -> bool:
    top = module.partition(".")[0]
    if top == "batchfinder":
        return True
    if top in sys.stdlib_module_names:
        return False
    is_installed = not _INSTALLED.isdisjoint(Path(file).parts)
    return not is_installed and not file.startswith(_STANDARD_LIBRARY)
