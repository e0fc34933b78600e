"""Find the batch size of a plain training loop, then train with it.

Try it:  python scripts/examples/fit_plain.py
Or from outside:  batchfinder run -- python scripts/examples/fit_plain.py --batch-size {batch_size}
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from batchfinder import find_max_batch


def main() -> None:
    """Train for one epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, help="default: the largest that trains")
    batch_size = parser.parse_args().batch_size

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))

    if batch_size is None:
        sample = next(iter(DataLoader(data, batch_size=2)))
        found = find_max_batch(model, sample, optimizer=optimizer, max_batch_size=len(data))
        print(found)
        batch_size = found.batch_size

    for inputs, targets in DataLoader(data, batch_size, shuffle=True):
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"trained with batch size {batch_size}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
