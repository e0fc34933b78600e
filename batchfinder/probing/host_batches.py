"""Make batches, and copies of the training state, in host memory only if they fit there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.errors import DeviceError
from batchfinder.probing.devices.cpu import host_memory
from batchfinder.probing.too_small import needs_more_than_one_sample
from batchfinder.training.sample import BatchMaker
from batchfinder.training.state.storage import frozen
from batchfinder.training.tree import bytes_in
from batchfinder.units import format_bytes


def check_room_for_copies(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Check that the host has room for the copies from which a search restores an accelerator.

    Raises:
        DeviceError: it has none. Without this check, the system would kill this process.
    """
    unchanged = {id(weight) for module in model.modules() for weight in frozen(module)}
    weights = [*model.parameters(), *model.buffers()]
    copied = [weight for weight in weights if id(weight) not in unchanged]
    copied += [weight.grad for weight in weights if weight.grad is not None]
    for state in optimizer.state.values() if optimizer else ():
        copied += [value for value in state.values() if isinstance(value, Tensor)]
    # Wrappers, and sparse tensors, are copied on their device.
    plain = [t for t in copied if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided]
    needed = sum(tensor.nbytes for tensor in plain if tensor.device.type not in ("cpu", "meta"))
    if needed > (available := host_memory()[1]):
        raise DeviceError(
            f"the host has no room for copies of model and optimizer, from which a search restores "
            f"them: {format_bytes(needed)} needed, {format_bytes(available)} available. Try the "
            "search before the model is on the device, or batchfinder find"
        )


def make_on_host(batches: BatchMaker, smallest: int, batch_size: int, step: int = 0) -> Any:
    """Make a batch in host memory, from where each step copies it to the device.

    Before the first batch, two small ones are made to learn their bytes, from the smallest size on.

    Raises:
        MemoryError: the host has no room for it. Without this check, the system would kill a
            process, and perhaps another one.
        Exception: what ``make_batch`` raises, unless a batch is too small for a layer.
    """
    if batches.batch_size is None and not batches.made:
        _make_small(batches, smallest, batch_size)
    needed, (_, available) = bytes_of(batches, batch_size), host_memory()
    if needed > available:
        raise MemoryError(
            f"the host's memory decides, not the device's: the batch needs {format_bytes(needed)} "
            f"there, and {format_bytes(available)} are available"
        )
    return batches.make(batch_size, step=step)


def _make_small(batches: BatchMaker, size: int, below: int) -> None:
    """Make a batch of a size and one of twice the size, if they are small enough."""
    try:
        if size < below:
            batches.make(size)
    except Exception as error:
        if not needs_more_than_one_sample(error):
            raise
    if 2 * size < below:
        batches.make(2 * size)


def bytes_of(batches: BatchMaker, batch_size: int) -> int:
    """Return the bytes of a batch's tensors. Nothing is allocated.

    If ``make_batch`` makes it, the line through the smallest and the largest batch that it made
    tells; 0 if it made none.

    Example:
        >>> import torch
        >>> bytes_of(BatchMaker(torch.zeros(2, 3)), 100)
        1200
    """
    if batches.batch_size is None:
        # One batch, or none, gives the line through no examples and no bytes.
        made = sorted(batches.made.items())
        (small, least), *_, (large, most) = made if len(made) > 1 else [(0, 0), *(made or [(1, 0)])]
        return most + max(0, most - least) * (batch_size - large) // (large - small)
    return bytes_in(batches.make(batch_size, most_elements=0))
