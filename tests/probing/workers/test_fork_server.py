"""The process that loads a target once and forks itself, and the estimate made beside the steps."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from processes import descendants, eventually, is_gone, supervisor

from batchfinder import Outcome
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers import child
from batchfinder.probing.workers.fork import ForkedProcess, obstacle_to_forks
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.search.run import run_search

pytestmark = pytest.mark.skipif(bool(obstacle_to_forks()), reason="needs forks")

OPTIONS = ProbeOptions(device="cpu")
TARGET = """
import batchfinder
import torch

def build(largest):
    with open({notes!r}, "a") as notes:
        notes.write("loaded\\n")

    def step(model, batch):
        if len(batch) > largest:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(batch).sum()

    return batchfinder.TrainingSetup(torch.nn.Linear(4, 2), torch.ones(2, 4), step=step)
"""


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes"
    (tmp_path / "train.py").write_text(TARGET.format(notes=str(path)))
    return path


def source(notes: Path) -> SetupSource:
    return SetupSource(f"{notes.parent}/train.py:build", {"largest": 5})


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start workers as forks: children with PyTorch imported already."""
    start = "batchfinder.probing.workers.process.start_python"
    monkeypatch.setattr(start, lambda _: ForkedProcess(child.main))


@pytest.mark.usefixtures("warm_workers")
def test_a_search_loads_its_target_once(notes: Path) -> None:
    ours = supervisor(source(notes), OPTIONS)
    try:
        result = run_search(ours)
    finally:
        ours.close()
    assert result.batch_size == 5
    assert sum(probe.outcome is Outcome.OOM for probe in result.probes) >= 1
    assert notes.read_text() == "loaded\n"
    assert set(result.seconds_by_part) == {"loading", "estimate", "steps", "restoring", "rest"}
    assert result.seconds_by_part["loading"] > 0


@pytest.mark.usefixtures("forked_workers")
def test_nothing_is_left_of_a_host_and_its_forks(notes: Path) -> None:
    ours = supervisor(source(notes), OPTIONS)
    assert ours.probe(2).fits
    started = descendants(os.getpid())
    assert len(started) == 2
    ours.close()
    assert all(map(is_gone, started))


@pytest.mark.usefixtures("forked_workers")
def test_a_host_that_is_killed_is_replaced(notes: Path) -> None:
    ours = supervisor(source(notes), OPTIONS)
    try:
        assert ours.probe(2).fits
        (host,) = (pid for pid in descendants(os.getpid()) if descendants(pid))
        os.kill(host, signal.SIGKILL)
        assert eventually(lambda: ours.probe(3).fits)
    finally:
        ours.close()
    assert notes.read_text() == 2 * "loaded\n"
