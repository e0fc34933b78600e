"""A machine with more than one GPU: the search uses the one it is told to, and no other."""

from __future__ import annotations

import pytest
import torch
from gpu.models import LIMIT, needs_cuda, needs_two_gpus, wide_model, wide_sample

from batchfinder import find_max_batch
from batchfinder.errors import StepError

pytestmark = [*needs_cuda, needs_two_gpus]


def test_the_current_device_stays_what_it_was() -> None:
    result = find_max_batch(wide_model(), wide_sample(), device="cuda:1", memory_limit=LIMIT)

    assert result.device.startswith("cuda:1 ")
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_reserved(0) == 0


def test_a_model_on_both_is_left_where_it_is() -> None:
    model = wide_model()
    model[:4].to("cuda:0")
    model[4:].to("cuda:1")

    with pytest.raises(StepError, match="the model is spread over cuda:0 and cuda:1"):
        find_max_batch(model, wide_sample(), memory_limit=LIMIT)

    homes = [parameter.device.index for parameter in model.parameters()]
    assert homes == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
