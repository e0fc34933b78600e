"""Classify point clouds with one small MLP that is shared by all points.

Try it: batchfinder find scripts/examples/train_mlp.py:build_model --memory-limit 2GiB
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 40


class PointMLP(nn.Module):
    """Residual blocks for each point, then the maximum over the points."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            for _ in range(depth)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        """From points (batch, points, 3) to logits (batch, classes)."""
        x = self.stem(points)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x.amax(dim=1))
        return logits


def build_model(width: int = 64, depth: int = 8) -> PointMLP:
    """The model to train."""
    return PointMLP(width, depth)


def build_sample(batch_size: int = 4, points: int = 128) -> tuple[Tensor, Tensor]:
    """One batch as the DataLoader yields it: points and a label for each cloud."""
    return torch.randn(batch_size, points, 3), torch.randint(CLASSES, (batch_size,))


def main(batch_size: int = 32, steps: int = 5) -> None:
    """Train for a few steps."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        points, labels = build_sample(batch_size)
        loss = nn.functional.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
