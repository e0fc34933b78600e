"""Numbers that a step reads without their values being known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from without_data import without_data

from batchfinder import estimate_peak_memory
from batchfinder.errors import StepError
from batchfinder.simulation.values.unknown import UnknownNumber, ValueUnknownError

LOGGED: list[Any] = []


def logging_step(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    mean = (loss.detach().item() + 2 * loss.item()) / 3
    LOGGED.append(round(mean, 4))
    assert json.dumps({"loss": mean, "shown": f"{mean:.3f}"})
    assert math.isfinite(mean)
    return loss


def test_a_step_may_log_its_loss() -> None:
    assert estimate_peak_memory(
        nn.Linear(4, 4), torch.ones(2, 4), step=logging_step, batch_size=8, gpu="t4"
    ).fits


@pytest.mark.parametrize("name", ["tensor", "as_tensor"])
def test_scalars_make_a_tensor(name: str) -> None:
    with without_data():
        make = getattr(torch, name)
        deepest = [torch.randn(3).max(), 1, torch.ones(2, dtype=torch.int64).sum()]
        listed = make(deepest, dtype=torch.float16)
        assert (listed.shape, listed.dtype) == ((3,), torch.float16)
        assert make([torch.arange(4).max() + 1]).dtype is torch.int64
        assert make([1, 2]).tolist() == [1, 2]


@pytest.mark.parametrize(
    "decide",
    [
        lambda number: number > 0,
        lambda number: number == 2.0,
        lambda number: bool(number),
        lambda number: int(number),
        lambda number: max(number, 1.0),
        lambda number: round(number),
        lambda number: torch.arange(3 * number),
        lambda number: torch.tensor([number, 1.0]).max().item() > 1,
        lambda number: (torch.ones(2) * number).sum().item() > 1,
    ],
)
def test_what_it_reads_decides_nothing(decide: Callable[[Any], Any]) -> None:
    with without_data():
        number = torch.randn(3).sum().item()
        assert isinstance(number, UnknownNumber)
        with pytest.raises((ValueUnknownError, DataDependentOutputException)):
            decide(number)


def test_a_decision_is_refused_with_its_line() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).square().mean()
        return loss * 2 if loss.item() > 1 else loss

    with pytest.raises(StepError, match=r"decides by it .*test_unknown.py:\d+.*batchfinder find"):
        estimate_peak_memory(nn.Linear(4, 4), torch.ones(2, 4), step=step, batch_size=8, gpu="t4")
