"""Make batches in host memory only if they fit there."""

from __future__ import annotations

from typing import Any

from batchfinder.probing.devices.cpu import host_memory
from batchfinder.training.sample import BatchMaker
from batchfinder.training.tree import named_tensors
from batchfinder.units import format_bytes


def make_on_host(batches: BatchMaker, batch_size: int, step: int = 0) -> Any:
    """Make a batch in host memory, from where each step copies it to the device.

    Raises:
        MemoryError: the host has no room for it. Without this check, the system would kill a
            process, and perhaps another one.
    """
    needed, (_, available) = bytes_of(batches, batch_size), host_memory()
    if needed > available:
        raise MemoryError(
            f"the host's memory decides, not the device's: the batch needs {format_bytes(needed)} "
            f"there, and {format_bytes(available)} are available"
        )
    return batches.make(batch_size, step=step)


def bytes_of(batches: BatchMaker, batch_size: int) -> int:
    """Return the bytes of a batch's tensors. Nothing is allocated.

    If ``make_batch`` makes it, each example counts as much as in the largest batch that it made
    before; 0 if it made none.

    Example:
        >>> import torch
        >>> bytes_of(BatchMaker(torch.zeros(2, 3)), 100)
        1200
    """
    if batches.batch_size is None:
        size, bytes_made = batches.made
        return bytes_made * batch_size // max(1, size)
    tensors = (tensor for _, tensor in named_tensors(batches.make(batch_size, most_elements=0)))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
