"""The values that fake tensors stand for, where they are known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from batchfinder.simulation.values.shapes import lacks_memory

MOST_ELEMENTS = 1 << 23
"""Larger values are let go: to compute with them would take longer than the trace."""


class _Known:
    """The value of a fake tensor; None once that does not hold any more."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | None = value

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copy has a storage of its own: let it be unknown


def know(
    tensor: Tensor, value: Tensor, copies: dict[int, torch.UntypedStorage] | None = None
) -> None:
    """Note the value of a fake tensor, unless it is too large.

    Args:
        tensor: a fake one.
        value: of the same shape and type; it is copied.
        copies: of whole storages, by the fake ones that they are for: tensors that look at the same
            one have values that do so too.
    """
    if not _is_plain(value):
        return
    storage, own = value.untyped_storage(), tensor.untyped_storage()
    is_alike = storage.nbytes() == own.nbytes() and _place(tensor) == _place(value)
    if copies is None or not is_alike or storage.nbytes() > MOST_ELEMENTS * value.itemsize:
        note(tensor, _copied(value))
        return
    with no_dispatch():
        if own._cdata not in copies:
            copies[own._cdata] = storage.cpu().clone()  # type: ignore[no-untyped-call]
        empty = torch.empty(0, dtype=value.dtype, device="cpu")
        note(tensor, empty.set_(copies[own._cdata], *_place(value)))


def note(fake: Tensor, value: Tensor) -> None:
    """Note the value of a fake tensor.

    The storage of the fake one belongs to that of the value from now on, and all that looks at it
    is to do so too. So it is seen where something writes to it through a tensor without a value,
    or a tensor gets another storage.

    Args:
        fake: the fake tensor; nothing is noted of others.
        value: of the same shape and type; what writes to the one has to write to the other.
    """
    if isinstance(fake, FakeTensor):
        vars(fake)["_known"] = _Known(value)
        vars(fake.untyped_storage())["_known"] = value.untyped_storage()


def let_go(tensor: Tensor) -> None:
    """Forget the value of a tensor that something unknown is written to, and of what it views."""
    if isinstance(tensor, FakeTensor):
        vars(tensor.untyped_storage()).pop("_known", None)
        known: _Known | None = vars(tensor).get("_known")
        if known is not None:
            known.value = None  # for copies by copy.copy(), which have their own storage here


def value_of(tensor: Tensor) -> Tensor | None:
    """The value of a tensor; None if it is not known."""
    if not isinstance(tensor, FakeTensor):
        return _copied(tensor) if _is_plain(tensor) else None
    known: _Known | None = vars(tensor).get("_known")
    if known is None or known.value is None:
        return None
    storage = vars(tensor.untyped_storage()).get("_known")
    return known.value if storage is known.value.untyped_storage() else None


def numbers_of(tensor: Tensor) -> list[Any] | None:
    """The values of a tensor, as Python's; None if they are not known."""
    value = value_of(tensor)
    if value is None:
        return None
    with no_dispatch():
        numbers: list[Any] = value.tolist()
        return numbers


def _is_plain(value: Tensor) -> bool:
    plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    if not plain or value.is_meta or value.numel() > MOST_ELEMENTS:
        return False
    return not lacks_memory(value)


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.size(), tensor.stride()


def _copied(value: Tensor) -> Tensor:
    """Apart from the user's own, which is never written to."""
    with no_dispatch():
        return value.detach().to("cpu", copy=True)
