"""What caches keep of a step without data."""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from batchfinder.simulation.tracing.fake import SimulatedMode
from batchfinder.training.state.anatomy import is_users, tensors_of, variables_of

# No cache has others inside that were there before; and there are tables with a million entries.
MOST_LOOKED_INTO = 1000
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, deque)


class Caches:
    """The caches of all code: those of :mod:`functools`, and what libraries make of variables.

    A mask or a table of positions is often computed once for each length. What a simulated step
    computes must not be there for a real one, nor for the next simulated one, which would then take
    it for memory that it need not ask for.

    Args:
        model: whose steps follow.

    Example:
        >>> caches = Caches(nn.Linear(1, 1))
        >>> caches.note()
        >>> caches.forget_fakes()  # after the step
    """

    def __init__(self, model: nn.Module) -> None:
        self._classes = {cls for module in model.modules() for cls in type(module).__mro__}
        self._before: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._containers: dict[int, Any] = {}

    def note(self) -> None:
        """Note the variables of libraries and of the model's classes, before a step.

        Those of the user's own modules are put back with all else that the step reaches.
        """
        modules = [
            thing for thing in [*sys.modules.values()] if issubclass(type(thing), ModuleType)
        ]
        libraries = [module for module in modules if not is_users(module)]
        spaces: list[tuple[Any, Any]] = [(variables_of(module), module) for module in libraries]
        # The variables of a class are shown by a proxy of the dict that holds them.
        spaces += [(gc.get_referents(vars(cls))[0], cls) for cls in self._classes]
        for space, owner in spaces:
            if id(space) not in self._before:
                self._before[id(space)] = owner, dict(space)
                self._note_containers(space.values())

    def forget_fakes(self) -> None:
        """Drop the tensors of simulated steps wherever they are kept."""
        gc.collect()  # a model without data is often a cycle
        things: list[Any] = _fakes()
        if things:
            _clear_those_of_functools()
        seen: set[int] = set()
        while things:
            ids = set(map(id, things))
            seen |= ids | {id(things)}
            holders = [thing for thing in gc.get_referrers(*things) if id(thing) not in seen]
            # What holds them and was not there before goes with what it holds.
            things = [holder for holder in holders if not self._let_go(holder, ids)]
            seen.add(id(holders))

    def _let_go(self, holder: Any, ids: set[int]) -> bool:
        """Whether some things are out of a holder now, or nothing can be done about it."""
        if id(holder) in self._before:
            self._put_back(*self._before[id(holder)], ids)
        elif id(holder) in self._containers:
            _drop(holder, ids)
        else:
            return type(holder) not in _CONTAINERS
        return True

    def _note_containers(self, values: Iterable[Any]) -> None:
        """Note those among some values, and those inside them."""
        found = [*values]
        while found:
            value = found.pop()
            if type(value) not in _CONTAINERS or id(value) in self._containers:
                continue
            self._containers[id(value)] = value
            if len(value) <= MOST_LOOKED_INTO:
                found += dict.values(value) if isinstance(value, dict) else value

    def _put_back(self, owner: Any, before: dict[str, Any], ids: set[int]) -> None:
        for name in [name for name, value in vars(owner).items() if id(value) in ids]:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def _drop(container: Any, ids: set[int]) -> None:
    """Take some things out of a container."""
    if isinstance(container, dict):
        items = [*dict.items(container)]
        for key in [key for key, value in items if id(key) in ids or id(value) in ids]:
            dict.__delitem__(container, key)
    elif not isinstance(container, tuple):
        kept = [item for item in container if id(item) not in ids]
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(kept)


def _fakes() -> list[Any]:
    """All tensors of simulated steps: torch.compile keeps some of its own kind."""
    fakes = (thing for thing in gc.get_objects() if type(thing) is FakeTensor)
    return [fake for fake in fakes if isinstance(fake.fake_mode, SimulatedMode)]


def _clear_those_of_functools() -> None:
    caches = [thing for thing in gc.get_objects() if type(thing) is functools._lru_cache_wrapper]
    for cache in caches:
        if any(type(tensor) is FakeTensor for tensor in _tensors_in(cache)):
            cache.cache_clear()


def _tensors_in(cache: Any) -> Iterator[Any]:
    """The tensors in keys and results, those of modules included."""
    held = (thing for thing in gc.get_referents(cache) if thing is not cache.__wrapped__)
    inside = [[*thing.items()] if isinstance(thing, dict) else thing for thing in held]
    for leaf in tree_leaves(inside):
        yield from tensors_of(leaf) if isinstance(leaf, nn.Module) else [leaf]
