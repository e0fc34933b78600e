"""A machine with more than one GPU: the search uses the one it is told to, and no other."""

from __future__ import annotations

import torch
from gpu.models import LIMIT, needs_cuda, needs_two_gpus, wide_model, wide_sample

from batchfinder import find_max_batch

pytestmark = [*needs_cuda, needs_two_gpus]


def test_the_current_device_stays_what_it_was() -> None:
    result = find_max_batch(wide_model(), wide_sample(), device="cuda:1", memory_limit=LIMIT)

    assert result.device.startswith("cuda:1 ")
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_reserved(0) == 0
