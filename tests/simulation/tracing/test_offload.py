"""Activations offloaded to the host use no GPU memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from batchfinder import estimate_max_batch

WIDTH, LAYERS = 256, 8


class Offloading(nn.Module):
    def __init__(self, offloads: bool, pin_memory: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.offloads, self.pin_memory = offloads, pin_memory

    def forward(self, rows: Tensor) -> Tensor:
        saved = save_on_cpu(pin_memory=self.pin_memory) if self.offloads else nullcontext()
        with saved:
            output: Tensor = self.layers(rows)
        return output.sum()


def per_sample(model: nn.Module) -> float:
    estimate = estimate_max_batch(model, torch.randn(2, WIDTH), gpu="t4")
    assert estimate.result.memory_model is not None
    return estimate.result.memory_model.per_sample_bytes


@pytest.mark.parametrize("pin_memory", [False, True])
def test_save_on_cpu_frees_the_activations(pin_memory: bool) -> None:
    row = WIDTH * 4
    # The batch and the output of each layer.
    assert per_sample(Offloading(False)) >= (LAYERS + 1) * row
    # The batch, and at most one restored input, two gradients and an output.
    assert per_sample(Offloading(True, pin_memory)) <= 5 * row


def test_save_on_cpu_is_restored() -> None:
    model = Offloading(True)
    per_sample(model)
    model(torch.randn(2, WIDTH)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
