"""The output of the step before, where no such step has run at this batch size."""

from __future__ import annotations

from typing import Any

import torch

from batchfinder.training.tree import named_tensors


class OldOutput:
    """Makes blocks as large as an output would be at another batch size.

    A probe runs one step. In training the output of the step before is alive in its forward pass:
    the logits of a language model are gigabytes. These blocks stand in for them.

    Args:
        device: where the step runs.
        batch_dim: the index of the batch dimension.

    Example:
        >>> old = OldOutput(torch.device("cpu"), batch_dim=0)
        >>> old.note(torch.ones(2, 3, requires_grad=True) * 1, batch_size=2)
        >>> [block.numel() for block in old.blocks(batch_size=8)]
        [96]
    """

    def __init__(self, device: torch.device, batch_dim: int) -> None:
        self._device = device
        self._batch_dim = batch_dim
        self._batch_size = 1
        self._storages: dict[int, tuple[int, bool]] = {}

    def note(self, output: Any, batch_size: int) -> None:
        """Note the bytes of an output's storages, and which of them grow with the batch size."""
        self._batch_size = batch_size
        self._storages = {}
        for _, tensor in named_tensors(output):
            if tensor.grad_fn is not None and tensor.device.type == self._device.type:
                has_examples = tensor.dim() > self._batch_dim
                grows = has_examples and tensor.shape[self._batch_dim] == batch_size
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = storage.nbytes(), grows

    def blocks(self, batch_size: int) -> list[torch.Tensor]:
        """Allocate a block for each storage, scaled to a batch size; none before :meth:`note`."""
        sizes = [
            size_bytes * batch_size // self._batch_size if grows else size_bytes
            for size_bytes, grows in self._storages.values()
        ]
        # Filled: on the CPU, memory that has not been written to does not count.
        return [torch.full((size,), 1, dtype=torch.uint8, device=self._device) for size in sizes]
