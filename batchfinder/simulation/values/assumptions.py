"""What is taken for granted of values that no data tells.

Numbers are finite, as in any training that goes well: models look whether they have to clamp them.
And a single number that a step draws is the highest of its range: layers are skipped by chance
where it is small (``torch.rand([]) < 0.1``), sizes are drawn up to the largest, and what skips
nothing and is largest takes most memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

HIGHEST = 0.999
"""Of the numbers from 0 to 1; 1 is not among them."""

_aten: Any = torch.ops.aten
_DRAWN: dict[Any, Callable[..., float]] = {
    _aten.rand.default: lambda size: HIGHEST,
    _aten.uniform_.default: lambda _, low=0.0, high=1.0: low + (high - low) * HIGHEST,
    _aten.randint.default: lambda high, size: high - 1,
    _aten.randint.low: lambda low, high, size: high - 1,
}
# Whether each is true for what is finite; isfinite() is composed of them.
_OF_ITSELF = {_aten.eq.Tensor: True, _aten.ne.Tensor: False}
_OF_INFINITY = {_aten.eq.Scalar: False, _aten.ne.Scalar: True}
_OF_ALL = {_aten.isnan.default: False, _aten.isinf.default: False}

ASSUMED = frozenset([*_DRAWN, *_OF_ITSELF, *_OF_INFINITY, *_OF_ALL])
"""The operators that something is taken for granted of."""


def drawn(func: OpOverload, args: Any) -> float | None:
    """The single number that an operator draws; None if it draws none."""
    draw = _DRAWN.get(func)
    return None if draw is None else draw(*args)


def if_finite(func: OpOverload, args: Any) -> bool | None:
    """What an operator says of each number of a tensor that is finite; None if that depends."""
    if func in _OF_ITSELF and args[0] is args[1]:
        return _OF_ITSELF[func]
    if func in _OF_INFINITY and isinstance(args[1], float) and math.isinf(args[1]):
        return _OF_INFINITY[func]
    return _OF_ALL.get(func)
