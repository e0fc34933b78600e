"""Restore the contents of containers, objects, classes and variables."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from types import CellType, FunctionType
from typing import Any

from batchfinder.training.state.anatomy import (
    CELL,
    Slot,
    attributes_of,
    container_of,
    contents_of,
    items_of,
    namespaces_of,
    slots_of,
    users_classes,
)
from batchfinder.training.state.process_settings import Undo, undone


def contents_kept(things: Iterable[Any]) -> AbstractContextManager[None]:
    """Restore the contents of each thing when the block ends."""
    return undone([put_back for thing in things for put_back in undo_of(thing)])


def undo_of(value: Any) -> list[Undo]:
    """Return functions that restore a thing's current contents: the same objects, one level deep.

    Args:
        value: a container, a closure's cell, a function (for the variables that it names), a class
            or an object with slots. Other things need no undo.

    Example:
        >>> steps = [1, 2]
        >>> undo = undo_of(steps)
        >>> steps.clear()
        >>> [run() for run in undo], steps
        ([None], [1, 2])
    """
    if isinstance(value, CellType):
        return [partial(_refill_slot, value, CELL, contents_of(value))]
    if isinstance(value, FunctionType):
        return [
            partial(_rename, space, {name: space[name] for name in names & space.keys()}, names)
            for space, names in namespaces_of(value)
        ]
    if isinstance(value, type):
        return [partial(_reset_class, cls, attributes_of(cls)) for cls in users_classes(value)]
    slots = [partial(_refill_slot, value, s, contents_of(value, s)) for s in slots_of(value)]
    if container_of(value) is None:
        return [*slots]
    return [partial(_refill, value, items_of(value)), *slots]


def _refill(container: Any, items: list[Any]) -> None:
    """Give a container its old items in their old order, unless it still has them."""
    kind, now = container_of(container), items_of(container)
    is_dict = isinstance(container, dict)
    # Compare by identity: == on tensors gives no bool, and equal objects may differ.
    flat_now, flat_items = (
        [part for pair in pairs for part in pair] if is_dict else pairs for pairs in (now, items)
    )
    if len(now) == len(items) and all(map(operator.is_, flat_now, flat_items)):
        return
    kind.clear(container)
    if isinstance(container, (dict, set)):
        kind.update(container, dict(items) if is_dict else items)  # Counter would count the pairs
    else:
        kind.extend(container, items)


def _refill_slot(owner: Any, slot: Slot, contents: tuple[Any, ...]) -> None:
    now = contents_of(owner, slot)
    if contents != () and (now == () or now[0] is not contents[0]):  # some slots are read-only
        slot.__set__(owner, contents[0])
    elif contents == () and now != ():
        slot.__delete__(owner)


def _rename(space: dict[str, Any], known: dict[str, Any], names: frozenset[str]) -> None:
    """Bind names to their old objects again, and delete new names."""
    for name in names:
        if name in known and space.get(name) is not known[name]:
            space[name] = known[name]
        elif name not in known:
            space.pop(name, None)


def _reset_class(cls: type, known: dict[str, Any]) -> None:
    now = attributes_of(cls)
    for name, value in known.items():
        if now.get(name) is not value:
            setattr(cls, name, value)
    for name in now.keys() - known.keys():
        delattr(cls, name)
