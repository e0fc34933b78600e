"""Remove simulated tensors from caches after a step."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from batchfinder.simulation.tracing.fake import SimulatedMode
from batchfinder.training.state.anatomy import is_users, tensors_of, variables_of

# Larger containers are not searched for nested ones: some tables have a million entries.
MOST_LOOKED_INTO = 1000
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, deque)


class Caches:
    """The caches of all code: those of :mod:`functools`, and variables that libraries fill.

    A mask or a table of positions is often computed once per length and cached. A tensor cached by
    a simulated step must not reach a real step. It must not reach the next simulated step either,
    which would then allocate too little.

    Example:
        >>> caches = Caches(nn.Linear(1, 1))
        >>> caches.note()
        >>> caches.forget_fakes()  # after the step
    """

    def __init__(self, model: nn.Module) -> None:
        self._classes = {cls for module in model.modules() for cls in type(module).__mro__}
        self._before: dict[int, tuple[Any, dict[str, Any]]] = {}
        # Their ids alone: a container that its library drops during a step has to die with what is
        # in it, as the dictionary of torch.nn.utils.parametrize.cached does.
        self._containers: set[int] = set()

    def note(self) -> None:
        """Record the variables of libraries and of the model's classes, before a step.

        Variables of the user's own modules are restored with everything else that a step reaches.
        """
        modules = [
            thing for thing in [*sys.modules.values()] if issubclass(type(thing), ModuleType)
        ]
        libraries = [module for module in modules if not is_users(module)]
        spaces: list[tuple[Any, Any]] = [(variables_of(module), module) for module in libraries]
        # vars(cls) is a proxy; its only referent is the dict itself.
        spaces += [(gc.get_referents(vars(cls))[0], cls) for cls in self._classes]
        for space, owner in spaces:
            if id(space) not in self._before:
                kept = {name: _kept(value) for name, value in space.items()}
                self._before[id(space)] = owner, kept
                self._note_containers(space.values())

    def forget_survivors(self, survivors: Iterable[weakref.ref[Any]]) -> None:
        """Remove the tensors of simulated steps from all caches, if there are any.

        Objects of a trace are mostly young, because the collector was off. Collecting those first
        is fast. A search for holders is far slower than collecting everything.
        """
        for collect in (partial(gc.collect, 1), gc.collect, self.forget_fakes):
            if all(survivor() is None for survivor in survivors):
                return
            collect()

    def forget_fakes(self) -> None:
        """Remove the tensors of simulated steps from all caches."""
        gc.collect()  # fake models often are reference cycles
        things: list[Any] = _fakes()
        if things:
            _clear_functools_caches()
        seen: set[int] = set()
        while things:
            ids, given = set(map(id, things)), tuple(things)  # Python 3.13 finds the arguments, too
            seen |= ids | {id(things), id(given)}
            holders = [thing for thing in gc.get_referrers(*given) if id(thing) not in seen]
            # Holders that did not exist before the step are removed from their own holders.
            things = [holder for holder in holders if not self._removed(holder, ids)]
            seen.add(id(holders))

    def _removed(self, holder: Any, ids: set[int]) -> bool:
        """Remove some things from a holder; return False if the holder itself must go."""
        if id(holder) in self._before:
            owner, before = self._before[id(holder)]
            for name in [name for name, value in vars(owner).items() if id(value) in ids]:
                if name in before:
                    setattr(owner, name, before[name])
                else:
                    delattr(owner, name)
        elif id(holder) in self._containers:
            _drop(holder, ids)
        else:
            return type(holder) not in _CONTAINERS
        return True

    def _note_containers(self, values: Iterable[Any]) -> None:
        """Record the containers among some values, and those inside them."""
        found = [value for value in values if type(value) in _CONTAINERS]
        while found:
            container = found.pop()
            if id(container) in self._containers:
                continue
            self._containers.add(id(container))
            if len(container) <= MOST_LOOKED_INTO:
                inside = dict.values(container) if isinstance(container, dict) else container
                found += [value for value in inside if type(value) in _CONTAINERS]


def _kept(value: Any) -> Any:
    """Return a variable's value as it is restored if a step binds the variable anew."""
    is_small = type(value) in _CONTAINERS and len(value) <= MOST_LOOKED_INTO
    return copy.copy(value) if is_small else value


def _drop(container: Any, ids: set[int]) -> None:
    """Remove some things from a container."""
    if isinstance(container, dict):
        items = [*dict.items(container)]
        for key in [key for key, value in items if id(key) in ids or id(value) in ids]:
            dict.__delitem__(container, key)
    elif not isinstance(container, tuple):
        kept = [item for item in container if id(item) not in ids]
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(kept)


def _fakes() -> list[Any]:
    """Return all tensors of simulated steps, without torch.compile's own fake tensors."""
    fakes = (thing for thing in gc.get_objects() if type(thing) is FakeTensor)
    return [fake for fake in fakes if isinstance(getattr(fake, "fake_mode", None), SimulatedMode)]


def _clear_functools_caches() -> None:
    caches = [thing for thing in gc.get_objects() if type(thing) is functools._lru_cache_wrapper]
    for cache in caches:
        if any(type(tensor) is FakeTensor for tensor in _tensors_in(cache)):
            cache.cache_clear()


def _tensors_in(cache: Any) -> Iterator[Any]:
    """Yield the tensors in a cache's keys and results, including those of modules."""
    held = (thing for thing in gc.get_referents(cache) if thing is not cache.__wrapped__)
    inside = [[*thing.items()] if isinstance(thing, dict) else thing for thing in held]
    for leaf in tree_leaves(inside):
        yield from tensors_of(leaf) if isinstance(leaf, nn.Module) else [leaf]
