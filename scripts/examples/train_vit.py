"""Classify small images with a vision transformer.

Try it: batchfinder find scripts/examples/train_vit.py:build_model --memory-limit 2GiB
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 10


class ViT(nn.Module):
    """Patches as tokens, a transformer encoder, and the mean of its tokens."""

    def __init__(self, width: int, depth: int, image_size: int, patch_size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch_size, stride=patch_size)
        tokens = (image_size // patch_size) ** 2
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 16, 4 * width, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """From images (batch, 3, height, width) to logits (batch, classes)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.encoder(tokens).mean(dim=1))
        return logits


def build_model(width: int = 64, depth: int = 4, image_size: int = 32, patch_size: int = 4) -> ViT:
    """The model to train."""
    return ViT(width, depth, image_size, patch_size)


def build_sample(batch_size: int = 4, image_size: int = 32) -> tuple[Tensor, Tensor]:
    """One batch as the DataLoader yields it: images and their labels."""
    images = torch.randn(batch_size, 3, image_size, image_size)
    return images, torch.randint(CLASSES, (batch_size,))
