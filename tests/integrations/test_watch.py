"""The memory of each step of a loop."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from batchfinder import watch_memory
from batchfinder.errors import BatchFinderWarning
from batchfinder.integrations.watch import LEAKING_STEPS, MemoryWatch, WatchedStep
from batchfinder.units import GIB, MIB


def step(peak: int, *, retries: int = 0, in_use: int = 0) -> WatchedStep:
    return WatchedStep(peak, peak, retries, in_use)


def test_every_optimizer_step_of_a_loop_is_recorded() -> None:
    model = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_memory("cpu") as memory:
        for _ in range(3):
            model(torch.randn(4096, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()  # no longer watched

    assert len(memory.steps) == 3
    assert all(one.peak_allocated_bytes > 0 for one in memory.steps)
    assert str(memory).startswith("3 steps on cpu: peak ")
    assert not memory.warnings


def test_a_large_step_shows_its_peak() -> None:
    model = nn.Linear(1024, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_memory("cpu") as memory:
        for rows in (64, 65536):
            model(torch.ones(rows, 1024)).sum().backward()
            optimizer.step()

    small, large = (one.peak_allocated_bytes for one in memory.steps)
    assert large - small > 256 * MIB * 0.9  # its input alone


@pytest.mark.parametrize("with_scheduler", [False, True])
def test_a_loop_that_keeps_its_losses_is_warned_of(with_scheduler: bool) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if with_scheduler:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    kept: list[Tensor] = []

    def train() -> None:
        for _ in range(LEAKING_STEPS + 1):
            output = model(torch.randn(16384, 64))
            kept.append(output)
            output.sum().backward()
            optimizer.step()

    with (
        watch_memory("cpu") as memory,
        pytest.warns(BatchFinderWarning, match=r"Try detach\(\)") as warned,
    ):
        train()

    assert warned[0].filename == __file__  # the line of the optimizer's step
    assert [*memory.warnings] == ["leak"]


def test_each_kind_of_trouble_is_warned_of_once() -> None:
    watch = MemoryWatch("cuda:0", limit_bytes=10 * GIB)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        for retries in (1, 0, 1):  # not in a row
            watch.note(step(5 * GIB, retries=retries))
        assert not raised
        for _ in range(3):
            watch.note(step(10 * GIB - 100 * MIB, retries=2))

    assert [*watch.warnings] == ["flushing", "close"]
    assert len(raised) == 2
    assert "steps 3 and 4" in watch.warnings["flushing"]
    assert "step 4 came within 100.0 MiB of the memory limit, 10.0 GiB" in watch.warnings["close"]
    assert watch.peak_bytes == 10 * GIB - 100 * MIB
