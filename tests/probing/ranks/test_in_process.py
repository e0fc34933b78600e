from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from batchfinder.probing.ranks.in_process import has_large_buckets


def test_large_buckets_are_those_of_a_wrapper_that_the_user_made() -> None:
    model = nn.Linear(255, 4)  # 4096 bytes of gradients
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()
    assert has_large_buckets(wrapped, 80_000)
    assert not has_large_buckets(wrapped, 100_000)
    assert not has_large_buckets(model, 80_000)
