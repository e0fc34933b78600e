"""Segment images with a U-Net: a label for every pixel.

Try it: batchfinder find scripts/examples/train_unet.py:build_model --memory-limit 2GiB
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

CLASSES = 4


def convolutions(in_channels: int, out_channels: int) -> nn.Sequential:
    """Two convolutions, each with group normalisation."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1),
        nn.GroupNorm(4, out_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(out_channels, out_channels, 3, padding=1),
        nn.GroupNorm(4, out_channels),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Down to a small image with many channels and up again, with a skip at every level."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(levels)]
        pairs = list(pairwise(channels))
        self.stem = convolutions(3, width)
        self.down = nn.ModuleList(convolutions(small, large) for small, large in pairs)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(large, small, 2, stride=2) for small, large in reversed(pairs)
        )
        self.merge = nn.ModuleList(convolutions(2 * small, small) for small, _ in reversed(pairs))
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """From images (batch, 3, height, width) to logits (batch, classes, height, width)."""
        x = self.stem(images)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(nn.functional.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], dim=1))
        logits: Tensor = self.head(x)
        return logits


def build_model(width: int = 8, levels: int = 3) -> UNet:
    """The model to train."""
    return UNet(width, levels)


def build_sample(batch_size: int = 2, image_size: int = 64) -> tuple[Tensor, Tensor]:
    """One batch as the DataLoader yields it: images and a label for every pixel."""
    images = torch.randn(batch_size, 3, image_size, image_size)
    return images, torch.randint(CLASSES, (batch_size, image_size, image_size))
