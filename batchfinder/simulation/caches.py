"""What the caches of functions keep of a step without data."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from batchfinder.training.anatomy import tensors_of


def forget_fakes() -> None:
    """Clear each cache of :mod:`functools` that holds a tensor without data.

    A mask or a table of positions is often computed once for each length. What a simulated step
    computes must not be there for a real one, nor for the next simulated one, which would then take
    it for memory that it need not ask for.
    """
    caches = [thing for thing in gc.get_objects() if type(thing) is functools._lru_cache_wrapper]
    for cache in caches:
        if any(isinstance(tensor, FakeTensor) for tensor in _tensors_in(cache)):
            cache.cache_clear()


def _tensors_in(cache: Any) -> Iterator[Any]:
    """The tensors in keys and results, those of modules included."""
    held = (thing for thing in gc.get_referents(cache) if thing is not cache.__wrapped__)
    inside = [[*thing.items()] if isinstance(thing, dict) else thing for thing in held]
    for leaf in tree_leaves(inside):
        yield from tensors_of(leaf) if isinstance(leaf, nn.Module) else [leaf]
