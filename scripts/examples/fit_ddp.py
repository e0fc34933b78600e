"""Find one batch size for all ranks of a DistributedDataParallel job, then train with it.

Try it:  torchrun --nproc-per-node 2 scripts/examples/fit_ddp.py
Or from outside:
  batchfinder run -- torchrun --nproc-per-node 2 scripts/examples/fit_ddp.py \
      --batch-size {batch_size}
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from batchfinder import find_max_batch


def main() -> None:
    """Train for one epoch on all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, help="per rank; default: the largest that trains")
    batch_size = parser.parse_args().batch_size

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters())
    data = TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))

    if batch_size is None:
        # Every rank makes this call, and all get the same answer.
        sample = next(iter(DataLoader(data, batch_size=2)))
        most = len(data) // dist.get_world_size()
        found = find_max_batch(ddp, sample, optimizer=optimizer, device=device, max_batch_size=most)
        batch_size = found.batch_size

    for inputs, targets in DataLoader(data, batch_size, sampler=DistributedSampler(data)):
        loss = nn.functional.cross_entropy(ddp(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"trained with batch size {batch_size} per rank: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
