"""Small models that users could have, as targets of the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from batchfinder import TrainingSetup

MIB = 2**20
ROW_BYTES = 8 * MIB


class Hungry(nn.Module):
    """Holds 3 activations of 8 MiB per example and computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        for _ in range(3):
            rows = torch.relu(rows * self.weight)
        return rows.mean()


def build_hungry(width: int = ROW_BYTES // 4) -> tuple[nn.Module, Tensor]:
    return Hungry(), torch.ones(2, width)


class _Kept(torch.autograd.Function):
    """Keeps 40 MiB per example for the backward pass, which nothing is ever written to."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(len(rows), 40 * MIB, dtype=torch.uint8))
        return rows * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, gradient.sum()


class Reserving(nn.Module):
    """So fast that searches for it take no longer than the workers need to start."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = _Kept.apply(rows, self.weight)  # type: ignore[no-untyped-call]
        return output.mean()


def build_reserving() -> tuple[nn.Module, Tensor]:
    return Reserving(), torch.ones(2, 4)


def build_hungry_optimizer() -> TrainingSetup:
    """Its optimizer alone needs more than the tests' limits, before the first step."""

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        torch.ones(2**30)
        return torch.optim.SGD(parameters)

    return TrainingSetup(Hungry(), torch.ones(2, 4), optimizer=make_optimizer)


def build_small(width: int = 4) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return nn.Linear(width, 2), (torch.randn(3, width), torch.tensor([0, 1, 1]))


def build_without_sample() -> nn.Module:
    return nn.Linear(4, 2)


def build_normalized() -> tuple[nn.Module, Tensor]:
    """A batch of 1 is too small for its BatchNorm; otherwise it is as hungry as the other."""
    return nn.Sequential(nn.BatchNorm1d(4), _Widened(), Hungry()), torch.randn(3, 4)


class _Widened(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.repeat(1, ROW_BYTES // 4 // rows.shape[1])


class Squeezing(nn.Linear):
    def forward(self, rows: Tensor) -> Tensor:
        examples, _ = super().forward(rows).squeeze().shape
        return torch.ones(examples, 4) * self.weight.sum()


class Grouped(nn.Linear):
    """Takes four views of each object."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows).view(-1, 4, self.out_features).mean(1)


def build_grouped() -> tuple[nn.Module, Tensor]:
    return Grouped(4, 2), torch.ones(8, 4)


def build_squeezing() -> tuple[nn.Module, Tensor]:
    return Squeezing(4, 2), torch.ones(3, 4)


def build_nan() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 2), torch.full((2, 4), float("nan"))


def build_without_gradient() -> TrainingSetup:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            loss: Tensor = model(batch).mean()
        return loss

    return TrainingSetup(nn.Linear(4, 2), torch.ones(2, 4), step=step)


def build_broken() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 2), torch.ones(2, 5)


class _Limited(nn.Module):
    """Fails beyond 4 examples, for no want of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, rows: Tensor) -> Tensor:
        if len(rows) > 4:
            raise ValueError("only 4 positions were learned")
        output: Tensor = self.layer(rows).mean()
        return output


def build_limited() -> tuple[nn.Module, Tensor]:
    return _Limited(), torch.ones(2, 4)


def build_frozen() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 2).requires_grad_(False), torch.ones(2, 4)


def build_without_tensors() -> tuple[nn.Module, Any]:
    return nn.Linear(4, 2), ["a", "b"]


def build_disagreeing() -> tuple[nn.Module, Any]:
    return nn.Linear(4, 2), (torch.ones(2, 4), torch.ones(3, 2))


def build_nothing() -> None:
    nn.Linear(4, 2)
