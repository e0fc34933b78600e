"""Assumptions about unknown values.

All numbers are finite, as in any healthy training run; some models check this before they clamp.

A single random number is the highest of its range. Models skip layers at random if it is small
(``torch.rand([]) < 0.1``) and draw sizes up to a maximum. The highest number skips nothing and
draws the largest size, so it uses the most memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

HIGHEST = 0.999
"""The number drawn from [0, 1)."""

_aten: Any = torch.ops.aten
_DRAWN: dict[Any, Callable[..., float]] = {
    _aten.rand.default: lambda size: HIGHEST,
    _aten.uniform_.default: lambda _, low=0.0, high=1.0: low + (high - low) * HIGHEST,
    _aten.randint.default: lambda high, size: high - 1,
    _aten.randint.low: lambda low, high, size: high - 1,
}
# The results of each for finite numbers. isfinite() is composed of these operators.
_OF_ITSELF = {_aten.eq.Tensor: True, _aten.ne.Tensor: False}
_OF_INFINITY = {_aten.eq.Scalar: False, _aten.ne.Scalar: True}
_OF_ALL = {_aten.isnan.default: False, _aten.isinf.default: False}

ASSUMED = frozenset([*_DRAWN, *_OF_ITSELF, *_OF_INFINITY, *_OF_ALL])
"""The operators with an assumption."""


def drawn(func: OpOverload, args: Any) -> float | None:
    """Return the single number that an operator draws; None if it draws none."""
    draw = _DRAWN.get(func)
    return None if draw is None else draw(*args)


def if_finite(func: OpOverload, args: Any) -> bool | None:
    """Return an operator's result for every finite number; None if it depends on the number."""
    if func in _OF_ITSELF and args[0] is args[1]:
        return _OF_ITSELF[func]
    if func in _OF_INFINITY and isinstance(args[1], float) and math.isinf(args[1]):
        return _OF_INFINITY[func]
    return _OF_ALL.get(func)
