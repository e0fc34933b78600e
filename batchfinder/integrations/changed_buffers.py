"""Buffers that forward passes change: a pass that is dropped must not have changed them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class ChangedBuffers:
    """The buffers of a model that change in forward passes, to restore them after a failed one.

    Before the first step all are saved that may change; integers are packed weights or masks,
    unless they count. Later, those are saved that changed in the first step, and those of norms.

    Attributes:
        has_norms: True if BatchNorm layers or the like keep running statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        self._followed = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and _may_change(buffer)
        ]
        self.has_norms = any(_is_norm(module) for module, _ in self._followed)
        self._saved: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._is_first = True

    @torch.no_grad()
    def save(self) -> None:
        """Copy the values, before a step."""
        self._saved = [
            (module, name, buffer, buffer.clone())
            for module, name in self._followed
            if (buffer := module._buffers.get(name)) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Give each buffer that has changed its saved value."""
        for module, name, buffer, value in self._saved:
            module._buffers[name] = buffer  # the pass may have assigned another tensor
            if not torch.equal(buffer, value):
                buffer.copy_(value)

    def note_changes(self) -> None:
        """Forget the values after a step, and the buffers that the first step has not changed."""
        if self._is_first:  # comparing waits for the device
            self._followed = [
                (module, name)
                for module, name, buffer, value in self._saved
                if _is_norm(module)
                or module._buffers.get(name) is not buffer
                or not torch.equal(buffer, value)
            ]
        self._is_first, self._saved = False, []


def _may_change(buffer: Tensor) -> bool:
    # Sparse ones are graphs, and torch.equal does not compare them.
    is_dense = buffer.layout is torch.strided and not buffer.is_inference()
    return is_dense and (buffer.is_floating_point() or buffer.numel() == 1)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.track_running_stats
