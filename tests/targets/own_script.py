"""A user's own script for torchrun: looks for its batch size, then goes on training."""

from __future__ import annotations

import json
import os
import sys
import weakref
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import batchfinder
from batchfinder.training import parallel

MIB = 2**20


class Wrapper(DistributedDataParallel):
    """Counts itself, because buckets of one that is not collected take memory of the next."""

    alive: ClassVar[weakref.WeakSet[Wrapper]] = weakref.WeakSet()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.alive.add(self)


class Mine(nn.Module):
    """Defined in the script itself, so no worker process can get it."""

    def __init__(self, oom_at: int, *, leaves_holes: bool, gathers: bool) -> None:
        super().__init__()
        self.leaves_holes, self.gathers, self.largest = leaves_holes, gathers, 0
        self.layer = nn.Linear(4, 4)
        self.oom_at = oom_at

    def forward(self, rows: Tensor) -> Tensor:
        if dist.get_rank() == 1 and len(rows) >= self.oom_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        assert len(Wrapper.alive) <= 1, "an old wrapper has not been collected"
        assert self.layer.weight.grad is None, "gradients take the place of activations"
        if dist.get_rank() == 1 and self.leaves_holes and self.largest > len(rows):
            torch.empty(2**31, dtype=torch.uint8)  # more than the limit, but never written to
        self.largest = max(self.largest, len(rows))
        output: Tensor = self.layer(rows)
        if self.gathers:  # as for a loss over the examples of all ranks
            dist.all_reduce(output.detach().mean())
        return output.mean()


def main(what: str, kind: str = "cpu") -> None:
    """``what``: "here", "holes", "gathers", "bare", "worker", "synchronized", or "sharded ..."."""
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    mine = Mine(oom_at=6, leaves_holes=what == "holes", gathers=what == "gathers")
    is_mine = what in ("here", "holes", "gathers", "bare")
    model: nn.Module = mine if is_mine else nn.Linear(4, 4)
    model.to(device)
    if what == "sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    elif what == "sharded by the first FSDP":
        model = FullyShardedDataParallel(model, device_id=device, use_orig_params=True)
    elif what == "synchronized":
        model = nn.Sequential(model, nn.SyncBatchNorm(4))
    else:
        vars(parallel)["DistributedDataParallel"] = Wrapper
        model = model if what == "bare" else Wrapper(model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        result = batchfinder.find_max_batch(
            model,
            torch.ones(2, 1 + dist.get_rank(), 4),  # its own data has another length
            device=device,
            memory_limit=(1200 + 200 * dist.get_rank()) * MIB * dist.get_world_size(),
            max_batch_size=8,
        )
    except batchfinder.BatchFinderError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        dist.destroy_process_group()
        return
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model(torch.ones(2, 4, device=device)).mean().backward()
    everybody: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everybody, result.to_json())
    if dist.get_rank() == 0:
        print(json.dumps([json.loads(one) for one in everybody]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    # As Python exits, gloo's threads may abort the process, also of a script that only wraps a
    # model, trains one step and destroys the group: 5 of 25 times with PyTorch 2.13.
    sys.stdout.flush()
    os._exit(0)
