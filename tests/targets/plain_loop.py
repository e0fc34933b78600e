"""A plain training loop under a memory limit, which knows nothing of batchfinder.

python plain_loop.py MODULE FUNCTION BATCH_SIZE LIMIT_BYTES STEPS: exits with 0 if every step ran.
"""

from __future__ import annotations

import importlib
import resource
import sys

import torch


def main() -> None:
    module, function, batch_size, limit_bytes, steps = sys.argv[1:]
    model, sample = getattr(importlib.import_module(module), function)()
    optimizer = torch.optim.AdamW(model.parameters())
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit_bytes), int(limit_bytes)))
    for _ in range(int(steps)):
        batch = sample[:1].repeat(int(batch_size), *[1] * (sample.dim() - 1))
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
