"""Activations that wait on the host for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from batchfinder.simulation.values.shapes import new_like


@contextmanager
def offload_simulated() -> Iterator[None]:
    """Let ``torch.autograd.graph.save_on_cpu`` free what it saves, and make it anew when needed.

    A copy to the host is none where all tensors without data are the CPU's.
    """
    on_gpu = save_on_cpu.__init__

    def on_host(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
        # What new_like makes is not tracked: the host holds it.
        saved_tensors_hooks.__init__(self, new_like, torch.empty_like)

    save_on_cpu.__init__ = on_host  # type: ignore[method-assign]
    try:
        yield
    finally:
        save_on_cpu.__init__ = on_gpu  # type: ignore[method-assign]
