from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from batchfinder.errors import UsageError
from batchfinder.probing.choose_prober import choose_prober
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.ranks.in_process import has_large_buckets
from batchfinder.training.setup import TrainingSetup


def test_ranks_that_would_share_a_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would raise an error of its own, and each rank would count on all of the memory."""
    meeting = SimpleNamespace(gather=lambda said: [said, said])
    device = SimpleNamespace(torch_device=torch.device("cuda:0"), leaves_no_trace=True)
    gpu = SimpleNamespace(uuid="5ebe9f43")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr("batchfinder.probing.ranks.meeting.open_meeting", lambda: meeting)
    monkeypatch.setattr("batchfinder.probing.choose_prober.choose_device", lambda *_: device)
    with pytest.raises(UsageError, match=r"would use one device, as cuda:0 here. Try torch.cuda"):
        choose_prober(TrainingSetup(nn.Linear(1, 1)), ProbeOptions(strategy="ddp"))


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
