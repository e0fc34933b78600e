"""DCGAN: two models, two optimizers, on images of 64 x 64."""

from __future__ import annotations

import itertools
from typing import Any

import setup_loop
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

NOISE = 100


class Gan(nn.Module):
    """A generator and a discriminator.

    Args:
        width: channels of the widest image.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        g: list[nn.Module] = []
        channels = [NOISE, *(width * n for n in (8, 4, 2, 1))]
        for i, (inner, outer) in enumerate(itertools.pairwise(channels)):
            stride, padding = (1, 0) if i == 0 else (2, 1)
            g += [nn.ConvTranspose2d(inner, outer, 4, stride, padding, bias=False)]
            g += [nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
        self.generator = nn.Sequential(*g, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
        d: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True)]
        for n in (1, 2, 4):
            d += [nn.Conv2d(width * n, width * n * 2, 4, 2, 1, bias=False)]
            d += [nn.BatchNorm2d(width * n * 2), nn.LeakyReLU(0.2, inplace=True)]
        self.discriminator = nn.Sequential(*d, nn.Conv2d(width * 8, 1, 4), nn.Flatten(0))


def target(width: int = 64) -> Any:
    """Return both models with the step that trains them."""
    from batchfinder import TrainingSetup

    gan = Gan(width)
    optimizer_g, optimizer_d = optimizers_of(gan)

    def step(model: nn.Module, real: Tensor) -> None:
        assert isinstance(model, Gan)
        noise = torch.randn(len(real), NOISE, 1, 1, device=real.device)
        fake = model.generator(noise)
        ones, zeros = real.new_ones(len(real)), real.new_zeros(len(real))
        optimizer_d.zero_grad()
        F.binary_cross_entropy_with_logits(model.discriminator(real), ones).backward()
        F.binary_cross_entropy_with_logits(model.discriminator(fake.detach()), zeros).backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        F.binary_cross_entropy_with_logits(model.discriminator(fake), ones).backward()
        optimizer_g.step()

    return TrainingSetup(gan, make_batch(2), step=step)


def optimizers_of(gan: Gan) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return those of the generator and of the discriminator."""
    return (
        torch.optim.Adam(gan.generator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
        torch.optim.Adam(gan.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
    )


def make_batch(batch_size: int) -> Tensor:
    """Return real images."""
    return torch.zeros(batch_size, 3, 64, 64)


def start(width: int = 64) -> tuple[Any, ...]:
    """Return both models on the device, and their optimizers."""
    gan = Gan(width).to(setup_loop.device)
    return gan, *optimizers_of(gan)


if __name__ == "__main__":
    device = setup_loop.device
    gan, optimizer_g, optimizer_d = setup_loop.kept(start)
    for real in (make_batch(setup_loop.batch_size) for _ in range(setup_loop.steps)):
        real = real.to(device)
        noise = torch.randn(len(real), NOISE, 1, 1, device=device)
        fake = gan.generator(noise)
        ones, zeros = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)
        optimizer_d.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(gan.discriminator(real), ones)
        loss_real.backward()
        loss_fake = F.binary_cross_entropy_with_logits(gan.discriminator(fake.detach()), zeros)
        loss_fake.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(gan.discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()
