"""Numbers that a step reads from tensors without data, and only computes with or logs.

A number whose value is unknown may be added up, formatted and printed. It decides nothing: a
comparison of it, or a size made from it, is refused.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from batchfinder.errors import StepError
from batchfinder.simulation.values.known import numbers_of
from batchfinder.training.state.patching import replaced

# Finite and near 1, as checks for infinity and logarithms expect, and exact in fp32. No real number
# is likely to have these digits, so a tensor made from it is recognized.
MARK = float.fromhex("0x1.a5f3d6p+0")
_PYTORCH = str(Path(torch.__file__).parent)
_SIZES = {"arange", "linspace", "logspace", "range"}


class ValueUnknownError(StepError):
    """A number whose value is unknown decides what the step does."""


class UnknownNumber(float):
    """A number of unknown value, which refuses to be compared.

    Example:
        >>> number = UnknownNumber()
        >>> type(2 * number + 1).__name__
        'UnknownNumber'
    """

    def __new__(cls, *_: Any) -> UnknownNumber:
        """Make one; its float value is :data:`MARK`."""
        return super().__new__(cls, MARK)

    def _refuse(self, *_: Any) -> Any:
        raise ValueUnknownError(
            "the step reads a value of a tensor (.item()) and decides by it (if, int(), max)"
        )

    def _computed(self, *_: Any) -> Any:
        return UnknownNumber()

    def __round__(self, digits: Any = None) -> Any:
        return self._refuse() if digits is None else UnknownNumber()

    __hash__ = float.__hash__
    __bool__ = __int__ = __floor__ = __ceil__ = __trunc__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _computed
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _computed


def unknown_numbers() -> AbstractContextManager[Any]:
    """Let ``.item()`` return an unknown number, unless PyTorch's own code asks."""
    original = FakeTensor.item

    def item(self: Any) -> Any:
        is_number = self.numel() == 1 and self.dtype.is_floating_point
        is_pytorchs = sys._getframe(1).f_code.co_filename.startswith(_PYTORCH)
        if not is_number or is_pytorchs or numbers_of(self) is not None:
            return original(self)
        return UnknownNumber()

    return replaced(FakeTensor, item=item)


def has_unknown(func: OpOverload, args: Any, values: Any) -> bool:
    """Return True if an operator computes with an unknown number.

    Raises:
        ValueUnknownError: the number is the size of a result.
    """
    if any(type(arg) in (float, UnknownNumber) and float.__eq__(arg, MARK) for arg in args):
        if func._schema.name.partition("::")[2] in _SIZES:
            raise ValueUnknownError("a value of a tensor (.item()) is the size of another")
        return True
    if func._opname != "lift_fresh":
        return False
    with no_dispatch():
        return any(
            bool((value == MARK).any())
            for value in values
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel() <= 64
        )
