"""Run an Accelerate training function again with a smaller size when it runs out of memory.

Try it:  python scripts/examples/fit_accelerate.py
Or from outside:
  batchfinder run -- python scripts/examples/fit_accelerate.py --batch-size {batch_size}
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from batchfinder.integrations.accelerate import find_executable_batch_size


def train(batch_size: int) -> float:
    """Train for one epoch, with all objects made in here: a call that failed leaves none."""
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    data = TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size, shuffle=True)
    )
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(f"trained with batch size {batch_size}: loss {loss.item():.3f}")
    return loss.item()


def main() -> None:
    """Train twice: the second run tries twice the size that worked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, help="default: from 128 on, at most 512")
    batch_size = parser.parse_args().batch_size
    if batch_size is not None:
        train(batch_size)
        return
    run = find_executable_batch_size(train, starting_batch_size=128, max_batch_size=512)
    run()
    run()


if __name__ == "__main__":
    main()
