"""What the GPU tests train: small models that fill memory fast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchfinder.units import GIB

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
DEVICE = "cuda:0"

# A few hundred MiB of it go to the CUDA context.
LIMIT = "2GiB"
LIMIT_BYTES = 2 * GIB

ROWS = 100


def wide_model() -> nn.Sequential:
    """About 1 MiB of activations per sample, and hardly any parameters."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 256, 10))


def wide_sample() -> tuple[Tensor, Tensor]:
    """Inputs and labels for :func:`wide_model`."""
    return torch.randn(4, 128, 256), torch.randint(10, (4,))


class ImageModel(nn.Module):
    """Has all that a step changes: batch statistics, dropout, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(3, 8, 1)
        self.frozen.requires_grad_(False)
        self.body = nn.Sequential(
            nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.5)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.frozen(images)).mean(dim=(2, 3)))  # type: ignore[no-any-return]


def image_sample() -> tuple[Tensor, Tensor]:
    """Inputs and labels for :class:`ImageModel`."""
    return torch.randn(4, 3, 32, 32), torch.randint(10, (4,))


class BreaksAboveRows(nn.Module):
    """Looks up one row per sample in a table of ROWS: beyond them the device asserts."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = torch.arange(len(inputs), device=inputs.device)
        return self.head(self.table(rows) + inputs)  # type: ignore[no-any-return]


def build_breaking() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A target for the command line."""
    return BreaksAboveRows(), (torch.randn(4, 16), torch.randint(10, (4,)))


def build_wide() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A target for the command line."""
    return wide_model(), wide_sample()


def train(model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: Any, steps: int = 1) -> None:
    """Train as a loop at module level does: a step's batch, output and loss live into the next."""
    for _ in range(steps):
        inputs, targets = (tensor.to(DEVICE) for tensor in batch)
        output = model(inputs)
        loss = nn.functional.cross_entropy(output, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def repeated(batch: tuple[Tensor, Tensor], batch_size: int) -> tuple[Tensor, Tensor]:
    """The examples of a batch again and again, up to a size."""
    inputs, targets = batch
    index = torch.arange(batch_size) % len(inputs)
    return inputs[index], targets[index]
