"""The gradient noise scale, on a model whose noise scale is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler

from batchfinder import TrainingSetup, noise_scale
from batchfinder.errors import SampleError, StepError, UsageError
from batchfinder.results.noise_scale import noise_scale_of

SIZE = 64


class Quadratic(nn.Module):
    """The loss ``|w - x|^2 / 2``: an example's gradient is ``w - x``, so its noise is that of x."""

    def __init__(self, distance: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((SIZE,), distance / SIZE**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.w - x) ** 2).sum(1).mean() / 2


def data(count: int = 2048) -> list[Tensor]:
    points = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(1))
    return [*((points - points.mean(0)) / points.std(0))]


@pytest.mark.parametrize("distance", [4.0, 1.0, 0.5])
def test_it_is_the_known_one(distance: float) -> None:
    known = SIZE / distance**2
    estimate = noise_scale(Quadratic(distance), loader=data(), device="cpu", draws=16)
    assert estimate.low < known < estimate.high
    assert estimate.examples == pytest.approx(known, rel=0.3)
    assert (estimate.small_batch_size, estimate.large_batch_size) == (8, 128)


def test_without_a_gradient_it_is_not_bounded() -> None:
    estimate = noise_scale(Quadratic(0.0), loader=data(), device="cpu")
    assert math.isinf(estimate.high)
    assert estimate.low > 200
    assert estimate.to_dict()["high"] is None


def test_equal_examples_have_no_noise() -> None:
    estimate = noise_scale_of([4.0, 4.0], [4.0, 4.0], 1, 16)
    assert (estimate.examples, estimate.low, estimate.high) == (0.0, 0.0, 0.0)


def test_everything_is_as_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, 4), nn.Dropout(), nn.BatchNorm1d(4)).eval()
    gradient = torch.ones(4)
    bias = model.get_parameter("0.bias")
    bias.grad = gradient
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    pairs = [(x, x[:4]) for x in data(64)]
    noise_scale(model, loader=pairs, device="cpu", draws=2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert bias.grad is gradient
    assert torch.equal(gradient, torch.ones(4))
    assert torch.equal(generator, torch.get_rng_state())
    assert not model.training


def test_it_needs_different_examples_and_their_gradients() -> None:
    with pytest.raises(UsageError, match="a repeated sample has none"):
        noise_scale(TrainingSetup(Quadratic(1.0), torch.zeros(2, SIZE)))
    examples: Any = data()
    few = DataLoader(examples, sampler=SubsetRandomSampler(range(5)))
    for loader, count in ((data(20), 20), (few, 5)):
        with pytest.raises(SampleError, match=f"has {count} examples, too few"):
            noise_scale(Quadratic(1.0), loader=loader, device="cpu")

    def trains(model: nn.Module, batch: Tensor) -> None:
        model(batch).backward()

    with pytest.raises(StepError, match="trains by itself"):
        noise_scale(Quadratic(1.0), loader=data(64), step=trains, device="cpu")


class Contrast(nn.Module):
    """A contrastive loss: each example is compared with all others of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, 16)

    def forward(self, x: Tensor) -> Tensor:
        points = nn.functional.normalize(self.layer(x))
        return nn.functional.cross_entropy(points @ points.T, torch.arange(len(x)))


class Total(Quadratic):
    """The same loss, summed over the examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(x)


@pytest.mark.parametrize("make", [Contrast, lambda: Total(4.0)])
def test_a_loss_that_is_no_mean_over_examples_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(StepError, match=r"the loss of 8 examples is .* Try a mean over examples"):
        noise_scale(make(), loader=data(), device="cpu")


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(SIZE), nn.Dropout()])
def test_a_mean_that_varies_with_the_batch_is_not_refused(layer: nn.Module) -> None:
    pairs = [(x, x[:1]) for x in data()]
    model = nn.Sequential(layer, nn.Linear(SIZE, 1))
    assert noise_scale(model, loader=pairs, device="cpu").examples > 0
