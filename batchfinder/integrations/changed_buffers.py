"""Buffers that forward passes change: a pass that is dropped must not have changed them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class ChangedBuffers:
    """The buffers of a model that change in forward passes, to restore them after a failed one.

    Before the first step all are saved that may change; integers are packed weights or masks,
    unless they count. Later, those are saved that changed in the step before, and those of norms.

    Attributes:
        of_norms: the running statistics of BatchNorm layers and the like.
    """

    def __init__(self, model: nn.Module) -> None:
        self.of_norms = [
            buffer
            for module in model.modules()
            if isinstance(module, _NormBase) and module.track_running_stats
            for buffer in module.buffers(recurse=False)
        ]
        self._followed = [
            buffer
            for buffer in model.buffers()
            if (buffer.is_floating_point() or buffer.numel() == 1) and not buffer.is_inference()
        ]
        self._saved: list[tuple[Tensor, Tensor, int]] = []

    def save(self) -> None:
        """Copy the values, before a step."""
        self._saved = [(buffer, buffer.clone(), buffer._version) for buffer in self._followed]

    def restore(self) -> None:
        """Give each buffer that has changed its saved value."""
        for buffer, value in self._changed():
            buffer.copy_(value)

    def note_changes(self) -> None:
        """Forget the values after a step, and the buffers that it has not changed."""
        self._followed = [buffer for buffer, _ in self._changed()]
        self._saved = []

    def _changed(self) -> list[tuple[Tensor, Tensor]]:
        # The kernels of BatchNorm write to its statistics without a new version.
        norms = {*map(id, self.of_norms)}
        return [
            (buffer, value)
            for buffer, value, version in self._saved
            if buffer._version != version or id(buffer) in norms
        ]
