"""What objects, classes, containers and functions are made of, and which are the user's own."""

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
    MemberDescriptorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
# Nothing hangs from these, and there may be millions of them in a list.
ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_BATCHFINDER = str(Path(__file__).parents[2]) + os.sep
_INSTALLED = {"site-packages", "dist-packages"}


def tensors_of(owner: nn.Module | Tensor) -> list[Tensor]:
    """The parameters and buffers of a module; a tensor itself."""
    return [owner] if isinstance(owner, Tensor) else [*owner.parameters(), *owner.buffers()]


def is_followed(value: Any) -> bool:
    """Whether the attributes of an object, which is no module, may change in a training step."""
    if isinstance(value, type | ModuleType | Dataset | DataLoader):
        return False
    if not hasattr(value, "__dict__"):
        return bool(slots_of(value))
    return (
        hasattr(type(value), "state_dict") or is_users(value) or isinstance(value, SimpleNamespace)
    )


def container_of(value: Any) -> Any:
    """The kind of container that an object is, also by inheritance; None for others.

    Example:
        >>> container_of(Counter()), container_of((1, 2))
        (<class 'collections.Counter'>, None)
    """
    return next((base for base in type(value).__mro__ if base in CONTAINERS), None)


def items_of(container: Any) -> list[Any]:
    """The items of a container, the pairs of a dict, whatever its class has made of iteration."""
    kind = container_of(container)
    return list(kind.items(container) if issubclass(kind, dict) else kind.__iter__(container))


def slots_of(value: Any) -> list[MemberDescriptorType]:
    """The ``__slots__`` of an object of the user's own class."""
    return [
        slot
        for cls in users_classes(type(value))
        for slot in vars(cls).values()
        if isinstance(slot, MemberDescriptorType)
    ]


def contents_of_slot(slot: MemberDescriptorType, owner: Any) -> tuple[Any, ...]:
    """What an object holds in a slot: one thing, or none yet."""
    try:
        return (slot.__get__(owner),)
    except AttributeError:
        return ()


def users_classes(cls: type) -> tuple[type, ...]:
    """A class and those that it inherits from, as far as they are the user's own.

    Left out are the kinds that are followed by themselves, or do not change; batchfinder's too.
    """
    if issubclass(cls, nn.Module | Tensor | Dataset | DataLoader | enum.Enum):
        return ()
    own = (base for base in cls.__mro__ if not base.__module__.startswith("batchfinder."))
    return tuple(base for base in own if is_users(base))


def attributes_of(cls: type) -> dict[str, Any]:
    """What a class itself holds: methods, properties, data; no slots, no ``__doc__`` and the like.

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
    """The functions and data that a class itself holds, without what is around them."""
    for value in attributes_of(cls).values():
        if isinstance(value, staticmethod | classmethod):
            yield value.__func__
        elif isinstance(value, property):
            yield from (value.fget, value.fset, value.fdel)
        elif isinstance(value, functools.cached_property):
            yield value.func
        else:
            yield value


def contents_of(cell: CellType) -> tuple[Any, ...]:
    """What a closure's cell holds: one thing, or none yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def namespaces_of(function: FunctionType) -> list[tuple[dict[str, Any], set[str]]]:
    """Where a user's function looks for names: its globals, and the user's modules that it reads.

    Returns:
        each namespace with the names that the function may look for there.
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


def globals_named(code: CodeType) -> set[str]:
    """The global names that a function's code reads or binds, and the functions inside it.

    Example:
        >>> sorted(globals_named((lambda: (len, [print for _ in ()])).__code__))
        ['len', 'print']
    """
    names = {step.argval for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")}
    return names.union(*map(globals_named, _codes_in(code)))


def _names_in(code: CodeType) -> set[str]:
    """All names in a function's code: of globals, attributes, imports."""
    return set(code.co_names).union(*map(_names_in, _codes_in(code)))


def _codes_in(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def wraps_users(function: FunctionType) -> bool:
    """Whether a function is the user's, or what the decorator of a library has made of one."""
    return is_users(function) or is_users(inspect.unwrap(function))


def is_users(thing: Any) -> bool:
    """Whether a function, module or class, or the class of an object, is the user's code.

    Or of batchfinder. Code of the standard library and what is installed as a package are others'.
    """
    if isinstance(thing, ModuleType):
        names = variables_of(thing)
        return _is_users_file(str(names.get("__name__")), str(names.get("__file__") or ""))
    if isinstance(thing, FunctionType):
        if not thing.__closure__ and thing.__code__.co_filename.startswith(_BATCHFINDER):
            return False  # ours hold something of the user's in closures alone
        return _is_users_file(thing.__module__ or "", thing.__code__.co_filename)
    module = thing.__module__ if isinstance(thing, type) else type(thing).__module__
    return _is_users_file(module, getattr(sys.modules.get(module), "__file__", None) or "")


def variables_of(module: ModuleType) -> dict[str, Any]:
    """The variables of a module, which one that loads lazily would load itself to tell."""
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
