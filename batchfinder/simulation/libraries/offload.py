"""Activations that are offloaded to the host until the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from batchfinder.simulation.values.shapes import new_like
from batchfinder.training.state.patching import replaced


def offload_simulated() -> AbstractContextManager[Any]:
    """Make ``torch.autograd.graph.save_on_cpu`` free each saved tensor until it is needed again.

    Its copy to the CPU would not change anything here, because all fake tensors are on the CPU.
    """

    def on_host(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
        # Tensors from new_like are not tracked, as if they were in host memory.
        saved_tensors_hooks.__init__(self, new_like, torch.empty_like)

    return replaced(save_on_cpu, __init__=on_host)
