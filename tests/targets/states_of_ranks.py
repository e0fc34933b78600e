"""What each rank of a real job holds after training steps, for torchrun: its bytes, by strategy."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from batchfinder.training.parallel import shard

# No dimension is a multiple of the ranks, and one is smaller.
WIDTHS = (33, 17, 3)


class Block(nn.Module):
    """A layer with a bias, and one without."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        added: Tensor = self.down(torch.relu(self.up(rows)))
        return rows + added


def build() -> tuple[nn.Module, Tensor]:
    """Three blocks between layers of other shapes."""
    first, second, last = WIDTHS
    blocks = nn.ModuleList(Block(second) for _ in range(3))
    model = nn.Sequential(nn.Linear(first, second), *blocks, nn.Linear(second, last))
    return model, torch.ones(2, first)


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """What the storages of tensors take; of a sharded one, this rank's part."""
    parts = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None]
    storages = {part.untyped_storage()._cdata: part.untyped_storage() for part in parts}
    return sum(storage.nbytes() for storage in storages.values())


def main(strategy: str) -> None:
    """``strategy``: as of an estimate."""
    dist.init_process_group("gloo")
    model, sample = build()
    optimizer: Optimizer
    if strategy in ("fsdp", "zero2"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        shard(model, mesh, keep_gathered=strategy == "zero2")
    else:
        model = DistributedDataParallel(model)
    if strategy == "zero1":
        # Not at the top: it warns of something deprecated in PyTorch.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW)
    else:
        optimizer = AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(sample).mean().backward()
        optimizer.step()
    states = getattr(optimizer, "optim", optimizer).state.values()
    held = {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(parameter.grad for parameter in model.parameters()),
        # Counters of steps are numbers. On CUDA, they stay in host memory.
        "optimizer states": bytes_of(
            one for state in states for one in state.values() if one.dim()
        ),
    }
    everybody: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, held)
    if dist.get_rank() == 0:
        print(json.dumps(everybody), flush=True)
    dist.barrier()
    # Taking a group of gloo down may wait for ever: https://github.com/pytorch/pytorch/issues/75097
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
