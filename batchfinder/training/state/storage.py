"""Save the values of a storage in host memory, and restore them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from batchfinder.errors import StepError


class SavedStorage:
    """The values of a storage, in host memory. Each of its tensors must be noted."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._values: Tensor | None = None
        self._tensors: list[tuple[Tensor, int]] = []

    def note(self, tensor: Tensor, *, is_copied: bool = True) -> None:
        """Note a tensor on this storage, with the number of changes to it so far.

        Unless ``is_copied``, no step writes to the storage through it, and it is only watched: a
        copy of a large model fills the host's memory.
        """
        self._tensors.append((tensor, tensor._version))
        if is_copied and self._values is None:
            self._values = host_copy(_bytes(self._storage))

    def restore(self, is_midway: bool) -> None:
        """Restore the values.

        ``is_midway``: other steps follow. If all tensors have moved to another device, the values
        here are then not read: the steps changed only the values there.
        """
        storage, values = self._storage, self._values
        changed = [tensor for tensor, version in self._tensors if tensor._version != version]
        if values is None:
            # Steps may write to values that have moved elsewhere: those here stay as they are.
            if any(not self._has_left(t) and self._is_here(t) for t in changed):
                raise StepError("the step writes to frozen weights. Try loading the model again.")
            self._tensors = [(tensor, tensor._version) for tensor, _ in self._tensors]
            return
        if is_midway and all(map(self._has_left, (tensor for tensor, _ in self._tensors))):
            return
        if storage.nbytes() != values.numel():
            storage.resize_(values.numel())
        now = _bytes(storage)
        # Unchanged values in host memory are not written: they may be mapped from a file,
        # read-only. Elsewhere, reading them costs as much as writing. The version does not count
        # every change, such as batch normalization's of its running statistics.
        is_written = storage.device.type != "cpu" or (is_midway and changed)
        if is_written or not torch.equal(now, values):
            now.copy_(values)

    def _has_left(self, tensor: Tensor) -> bool:
        return tensor.device != self._storage.device

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._storage.data_ptr()


def frozen(module: nn.Module) -> list[nn.Parameter]:
    """Return weights that no step writes to, and that may be too large to copy.

    These are quantized weights, and all frozen weights of a model with adapters (PEFT).
    """
    has_adapters = hasattr(module, "peft_config")
    weights = module.parameters(recurse=has_adapters)
    return [
        weight
        for weight in weights
        if not weight.requires_grad and (has_adapters or not weight.is_floating_point())
    ]


def leaving(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that ``module.to()`` moves.

    Those of a class with an ``_apply`` of its own may stay, such as an embedding on the host.
    """
    if type(module)._apply.__module__.partition(".")[0] == "torch":
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from leaving(child)


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory."""
    return tensor.detach().to("cpu", copy=True)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return the whole storage as a tensor of bytes: this covers views and strided tensors."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
