"""Memory that a kernel takes while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from batchfinder.simulation.trace.trace import Rule
from batchfinder.simulation.tracing.tracker import StorageTracker


@contextmanager
def taken(tracker: StorageTracker, sizes: Sequence[int | Rule]) -> Iterator[None]:
    """Note memory that a kernel takes all at once, and gives back when the block ends."""
    indices = [tracker.begin_transient(size) for size in sizes if size]
    yield
    for index in indices:
        tracker.end_transient(index)


def take(tracker: StorageTracker, sizes: Sequence[int | Rule]) -> None:
    """Note memory that a kernel takes all at once, and gives back."""
    with taken(tracker, sizes):
        pass


def size_of(tensor: Tensor) -> int:
    """The bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def copied_sizes(tensors: Iterable[Tensor]) -> list[int]:
    """The copies of those tensors that are not contiguous."""
    return [size_of(tensor) for tensor in tensors if not tensor.is_contiguous()]
