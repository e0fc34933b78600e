"""Classify small images with a residual network with batch normalisation.

Try it: batchfinder find scripts/examples/train_resnet.py:build_model --memory-limit 2GiB
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 10


class Block(nn.Module):
    """Two convolutions, each with batch normalisation, around a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """From (batch, in_channels, height, width) to the same with out_channels."""
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, three stages of blocks at falling resolution, and a linear head."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
        channels = width
        for stage in range(3):
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(Block(channels, width * 2**stage, stride))
                channels = width * 2**stage
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """From images (batch, 3, height, width) to logits (batch, classes)."""
        logits: Tensor = self.head(self.features(images).mean(dim=(2, 3)))
        return logits


def build_model(width: int = 8, blocks: int = 2) -> ResNet:
    """The model to train."""
    return ResNet(width, blocks)


def build_sample(batch_size: int = 4, image_size: int = 32) -> tuple[Tensor, Tensor]:
    """One batch as the DataLoader yields it: images and their labels."""
    images = torch.randn(batch_size, 3, image_size, image_size)
    return images, torch.randint(CLASSES, (batch_size,))
