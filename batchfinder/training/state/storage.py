"""Save the values of a storage in host memory, and restore them."""

from __future__ import annotations

import torch
from torch import Tensor

from batchfinder.errors import StepError


class SavedStorage:
    """The values of a storage, in host memory.

    Args:
        storage: the storage of one or more tensors. Each tensor must be noted.
        has_copy: False for frozen weights. They are only watched, because a copy of a large
            model's base would fill the host's memory.
    """

    def __init__(self, storage: torch.UntypedStorage, *, has_copy: bool = True) -> None:
        self._storage = storage
        self._values = host_copy(_bytes(storage)) if has_copy else None
        self._tensors: list[tuple[Tensor, int]] = []

    def note(self, tensor: Tensor) -> None:
        """Note a tensor on this storage, with the number of changes to it so far."""
        self._tensors.append((tensor, tensor._version))

    def restore(self, is_midway: bool) -> None:
        """Restore the values.

        Args:
            is_midway: True if other steps follow. If all tensors have moved to another device, the
                values here are then not read: the steps changed only the values there.

        Raises:
            StepError: a step wrote to frozen weights.
        """
        storage, values = self._storage, self._values
        if values is None:
            if any(tensor._version != version for tensor, version in self._tensors):
                raise StepError("the step writes to frozen weights. Try loading the model again.")
            return
        if is_midway and all(map(self._has_left, (tensor for tensor, _ in self._tensors))):
            return
        if storage.nbytes() != values.numel():
            storage.resize_(values.numel())
        now = _bytes(storage)
        has_changed = any(tensor._version != version for tensor, version in self._tensors)
        # Unchanged values are not written: they may be mapped from a file, read-only. The version
        # does not count every change, such as batch normalization's of its running statistics.
        if (is_midway and has_changed) or not torch.equal(now.cpu(), values):
            now.copy_(values)

    def _has_left(self, tensor: Tensor) -> bool:
        return tensor.device != self._storage.device


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory."""
    return tensor.detach().to("cpu", copy=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return the whole storage as a tensor of bytes: this covers views and strided tensors."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
