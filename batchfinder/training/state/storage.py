"""The values of a storage, kept in host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from batchfinder.errors import StepError


class SavedStorage:
    """The values of a storage, in host memory.

    Args:
        storage: of one or more tensors, each of which has to be noted.
        has_copy: False for frozen weights, which are only watched: a copy of the base of a large
            model would fill the host's memory.
    """

    def __init__(self, storage: torch.UntypedStorage, *, has_copy: bool = True) -> None:
        self._storage = storage
        self._values = host_copy(_bytes(storage)) if has_copy else None
        self._tensors: list[tuple[Tensor, int]] = []

    def note(self, tensor: Tensor) -> None:
        """Note a tensor on this storage, with the number of changes to it so far."""
        self._tensors.append((tensor, tensor._version))

    def restore(self, is_midway: bool) -> None:
        """Put the values back.

        Args:
            is_midway: whether other steps follow. Then values that every tensor has left for
                another device are not read: the steps changed those on the device.
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
        # What did not change is not written: it may be mapped from a file, read-only. Not every
        # change counts as one: batch normalization's of its running statistics does not.
        if (is_midway and has_changed) or not torch.equal(now.cpu(), values):
            now.copy_(values)

    def _has_left(self, tensor: Tensor) -> bool:
        return tensor.device != self._storage.device


def host_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor in host memory."""
    return tensor.detach().to("cpu", copy=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The storage itself as a tensor; so views, expanded and strided tensors need no care."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
