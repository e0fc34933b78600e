"""The protocol through which kernels note their requests to the allocator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch._ops import OpOverload

from batchfinder.simulation.trace.trace import Rule


class Recorder(Protocol):
    """The trace of a step that is being simulated."""

    def begin_transient(self, size: int | Rule, *, optional: bool = False) -> int:
        """Note memory that a kernel uses while it runs. Return the index that ends it."""

    def end_transient(self, index: int) -> None:
        """Note that a kernel has given memory back."""

    def empty_cache(self) -> None:
        """Note that the allocator gives its cached segments back."""

    def track_outputs(self, func: OpOverload, args: Any, output: Any) -> None:
        """Note the storages that an operator has made."""


@contextmanager
def taken(
    recorder: Recorder, sizes: Sequence[int | Rule], *, optional: bool = False
) -> Iterator[None]:
    """Note memory that a kernel uses all at once, and gives back when the block ends."""
    indices = [recorder.begin_transient(size, optional=optional) for size in sizes if size]
    yield
    for index in indices:
        recorder.end_transient(index)


def take(recorder: Recorder, sizes: Sequence[int | Rule], *, optional: bool = False) -> None:
    """Note memory that a kernel uses all at once, and gives back."""
    with taken(recorder, sizes, optional=optional):
        pass


def held(tensor: Tensor) -> Tensor:
    """Return the tensor that has the storage. For a DTensor, that is this rank's part."""
    part = getattr(tensor, "_local_tensor", tensor)
    return part if isinstance(part, Tensor) else tensor


def copied_sizes(tensors: Iterable[Tensor]) -> list[int]:
    """Return the sizes of the copies of those tensors that are not contiguous."""
    return [tensor.nbytes for tensor in tensors if not tensor.is_contiguous()]
