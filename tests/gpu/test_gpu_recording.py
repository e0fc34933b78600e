"""Recordings of requests to PyTorch's own CUDA allocator."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from gpu.models import DEVICE, needs_cuda

from batchfinder.probing.devices.allocator.recorded import foreseen
from batchfinder.probing.recording import recording
from batchfinder.probing.steadiness import PeakWatch
from batchfinder.search.prober import Recording
from batchfinder.units import MIB

pytestmark = needs_cuda


def test_blocks_are_recorded_with_their_streams() -> None:
    """Batches come on a stream of their own, as from timm's loader."""
    make_stream: Any = torch.cuda.Stream
    side = make_stream(DEVICE)
    device = torch.empty(0, device=DEVICE).device
    with torch.cuda.stream(side):
        held = torch.empty(30 * MIB, dtype=torch.uint8, device=DEVICE)
    with recording(device) as recorder:
        for _ in range(2):
            with torch.cuda.stream(side):
                batch = torch.empty(100 * MIB, dtype=torch.uint8, device=DEVICE)
            del batch
            output = torch.empty(100 * MIB, dtype=torch.uint8, device=DEVICE)
            del output
            recorder.end_step()
        fields = recorder.recording()

    assert fields is not None
    recorded = Recording(**fields)
    side_number = recorded.streams[recorded.held.index(held.nbytes)]
    batches, outputs = (recorded.streams[len(recorded.held) + first :: 2] for first in (0, 1))
    assert {*batches} == {side_number}
    assert side_number not in outputs
    assert len({*outputs}) == 1


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [("max_split_size_mb:64", "max_split_size_mb:64"), ("backend:cudaMallocAsync", "None")],
)
def test_settings_are_recorded_and_other_allocators_are_not(settings: str, recorded: str) -> None:
    code = (
        "import torch; from batchfinder.probing.recording import recording; torch.cuda.init()\n"
        f"with recording(torch.device({DEVICE!r})) as recorder: recorder.end_step()\n"
        "print((recorder.recording() or {}).get('settings'))"
    )
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, env=environment, text=True).strip() == recorded


def test_a_simulation_foresees_how_steps_go_on() -> None:
    """The second step sets a new peak, so three steps alone do not show a steady one."""
    device, budget = torch.empty(0, device=DEVICE).device, 1000 * MIB
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved()
    watch = PeakWatch(budget, least_steps=3, peaks_wander=False)
    with recording(device) as recorder:
        for step in range(3):
            torch.cuda.reset_peak_memory_stats()
            first = torch.empty(100 * MIB, dtype=torch.uint8, device=DEVICE)
            more = torch.empty(bool(step) * 30 * MIB, dtype=torch.uint8, device=DEVICE)
            watch.note(torch.cuda.max_memory_reserved())
            del first, more
            recorder.end_step()
        later = foreseen(recorder.recording, watch, budget)

    assert watch.peaks == [kept + 100 * MIB, kept + 130 * MIB, kept + 130 * MIB]
    assert not watch.is_settled
    assert later.is_settled
    assert later.peaks == [*watch.peaks, kept + 130 * MIB]


def test_workspaces_that_only_the_first_step_tries_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN's benchmark tries each kernel with a workspace as large as fits."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    device = torch.empty(0, device=DEVICE).device

    def ask(mib: int) -> torch.Tensor:
        return torch.empty(mib * MIB, dtype=torch.uint8, device=DEVICE)

    def run(*tried: int) -> None:
        output = ask(30)
        for each in (*tried, 20):
            ask(each)
        del output

    with recording(device) as recorder:
        for end in (recorder.end_step, recorder.end_validation):
            for tried in ([300, 20], []):
                run(*tried)
                end()
        fields = recorder.recording()

    assert fields is not None
    for step in (*fields["steps"], *fields["validations"]):
        assert [event // MIB for event in step if event > 0] == [30, 20]
    assert [len(fields["steps"]), len(fields["validations"])] == [2, 2]


def test_validations_are_recorded_apart_from_the_steps() -> None:
    device = torch.empty(0, device=DEVICE).device

    def step(mib: int) -> None:
        torch.empty(mib * MIB, dtype=torch.uint8, device=DEVICE)

    with recording(device) as recorder:
        for _ in range(2):
            step(30)
            assert not recorder.end_step()
        step(100)
        step(30)
        recorder.end_validation()
        fields = recorder.recording()

    assert fields is not None
    recorded = Recording(**fields)
    first = len(recorded.held)
    assert [*recorded.steps] == [(30 * MIB, ~first), (30 * MIB, ~(first + 1))]
    assert [*recorded.validations] == [(100 * MIB, ~(first + 2), 30 * MIB, ~(first + 3))]
