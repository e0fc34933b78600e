"""The known values of fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from batchfinder.simulation.values.shapes import lacks_memory

MOST_ELEMENTS = 1 << 23
"""Larger values are not kept: computing with them would take longer than the trace."""


class _Known:
    """The value of a fake tensor; None once it is out of date."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | None = value

    def __deepcopy__(self, memo: Any) -> None:
        return None  # a copy has its own storage, so its value is unknown


def know(
    tensor: Tensor, value: Tensor, copies: dict[int, torch.UntypedStorage] | None = None
) -> None:
    """Record a copy of a value for a fake tensor, unless it is too large.

    Args:
        tensor: a fake tensor.
        value: a tensor of the same shape and dtype.
        copies: copies of whole storages, by the fake storage they belong to. Fake tensors that
            share a storage get values that share one too.
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
    """Record the value of a fake tensor; other tensors are ignored.

    The fake storage is tied to the value's storage. The value is dropped once a tensor without a
    value writes to that fake storage, or once the fake tensor gets another storage.

    Args:
        fake: the fake tensor.
        value: a tensor of the same shape and dtype. Every write to ``fake`` must be repeated on it.
    """
    if isinstance(fake, FakeTensor):
        vars(fake)["_known"] = _Known(value)
        vars(fake.untyped_storage())["_known"] = value.untyped_storage()


def let_go(tensor: Tensor) -> None:
    """Drop the value of a tensor that unknown data is written to, and of all views of it."""
    if isinstance(tensor, FakeTensor):
        vars(tensor.untyped_storage()).pop("_known", None)
        known: _Known | None = vars(tensor).get("_known")
        if known is not None:
            known.value = None  # copy.copy() shares this object under another storage


def value_of(tensor: Tensor) -> Tensor | None:
    """Return the value of a tensor; None if it is unknown."""
    if not isinstance(tensor, FakeTensor):
        return _copied(tensor) if _is_plain(tensor) else None
    known: _Known | None = vars(tensor).get("_known")
    if known is None or known.value is None:
        return None
    storage = vars(tensor.untyped_storage()).get("_known")
    return known.value if storage is known.value.untyped_storage() else None


def numbers_of(tensor: Tensor) -> list[Any] | None:
    """Return the values of a tensor as Python numbers; None if they are unknown."""
    value = value_of(tensor)
    with no_dispatch():
        return None if value is None else value.tolist()


def _is_plain(value: Tensor) -> bool:
    plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
    if not plain or value.is_meta or value.numel() > MOST_ELEMENTS:
        return False
    return not lacks_memory(value)


def _place(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return int(tensor.storage_offset()), tensor.size(), tensor.stride()


def _copied(value: Tensor) -> Tensor:
    """Copy a value, so that simulated writes never reach the user's tensors."""
    with no_dispatch():
        return value.detach().to("cpu", copy=True)
