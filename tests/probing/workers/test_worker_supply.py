"""Where workers come from: forked where training runs on the CPU, else started one ahead."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE_SECONDS, descendants, eventually, is_gone, order

from batchfinder.errors import WorkerHungError, WorkerReleasedError
from batchfinder.probing.workers.process import WorkerProcess
from batchfinder.probing.workers.supply import WorkerSupply
from batchfinder.units import MIB

RESERVING = """
import batchfinder
import torch

def build(mib):
    def step(model, batch):
        reserved = torch.empty(mib * 2**20, dtype=torch.uint8)
        return model(batch).sum() + 0 * len(reserved)

    return batchfinder.TrainingSetup(torch.nn.Linear(8, 8), torch.ones(1, 8), step=step)
"""

DRAWING = """
import numpy
import random
import torch

def build():
    raise ValueError(f"{torch.rand(1).item()} {random.random()} {numpy.random.rand()}")
"""


@pytest.fixture
def on_cpu() -> Iterator[WorkerSupply]:
    ours = WorkerSupply("cpu", show_output=False)
    yield ours
    ours.close()


@pytest.fixture
def elsewhere() -> Iterator[WorkerSupply]:
    ours = WorkerSupply(None, show_output=False)
    yield ours
    ours.close()


def serves(worker: WorkerProcess) -> bool:
    """Whether it takes an order and answers; ends it."""
    worker.send(order("batchfinder.no_such_module:build"))
    try:
        return bool(worker.receive(PATIENCE_SECONDS)["kind"] == "UsageError")
    finally:
        worker.kill()


def peak_of(worker: WorkerProcess, first_order: dict[str, Any]) -> int:
    """The peak that it reads of a batch of one; ends it."""
    worker.send(first_order)
    assert worker.receive(PATIENCE_SECONDS)["answer"] == "ready"
    worker.send({"batch_size": 1, "confirm": False})
    while (answer := worker.receive(PATIENCE_SECONDS))["answer"] == "step":
        pass
    worker.kill()
    return int(answer["probe"]["peak_allocated_bytes"])


def started_here() -> set[int]:
    return set(descendants(os.getpid()))


def test_on_the_cpu_one_process_imports_pytorch_for_all_workers(on_cpu: WorkerSupply) -> None:
    before = started_here()
    first, second = on_cpu.take(PATIENCE_SECONDS), on_cpu.take(PATIENCE_SECONDS)
    # The fork server, and for each worker itself and the process that waits for its end.
    assert len(started_here() - before) == 1 + 2 * 2
    assert serves(second)
    assert serves(first)


def test_a_forked_worker_is_ended_with_all_that_it_started(on_cpu: WorkerSupply) -> None:
    before = started_here()
    worker = on_cpu.take(PATIENCE_SECONDS)
    assert worker.is_alive()
    worker.kill()
    assert not worker.is_alive()
    eventually(lambda: len(started_here() - before) == 1)
    on_cpu.close()
    assert started_here() == before


def test_nothing_is_left_of_what_was_forked(on_cpu: WorkerSupply) -> None:
    before = started_here()
    assert serves(on_cpu.take(PATIENCE_SECONDS))
    started = started_here() - before
    on_cpu.close()
    assert all(is_gone(pid) for pid in started)


def test_a_fork_that_takes_too_long_or_is_not_wanted_any_more(on_cpu: WorkerSupply) -> None:
    with pytest.raises(WorkerHungError):
        on_cpu.take(0)
    with pytest.raises(WorkerReleasedError):
        on_cpu.take(PATIENCE_SECONDS, lambda: True)


def test_a_fork_sees_memory_that_was_asked_for_and_not_written_to(
    on_cpu: WorkerSupply, tmp_path: Path
) -> None:
    (tmp_path / "reserving.py").write_text(RESERVING)
    target = f"{tmp_path}/reserving.py:build"
    without, reserving = (
        peak_of(on_cpu.take(PATIENCE_SECONDS), order(target, mib=mib)) for mib in (0, 60)
    )
    assert abs(reserving - without - 60 * MIB) < 2 * MIB


def test_random_numbers_differ_from_fork_to_fork(on_cpu: WorkerSupply, tmp_path: Path) -> None:
    (tmp_path / "drawing.py").write_text(DRAWING)
    drawn = []
    for _ in range(2):
        worker = on_cpu.take(PATIENCE_SECONDS)
        worker.send(order(f"{tmp_path}/drawing.py:build"))
        drawn.append(worker.receive(PATIENCE_SECONDS)["message"].split())
        worker.kill()
    first, second = drawn
    assert sum(one != other for one, other in zip(first, second, strict=True)) == 3


def test_a_fork_server_that_is_killed_is_replaced(on_cpu: WorkerSupply) -> None:
    before = started_here()
    assert serves(on_cpu.take(PATIENCE_SECONDS))
    eventually(lambda: len(started_here() - before) == 1)
    (server,) = started_here() - before
    os.kill(server, signal.SIGKILL)
    assert serves(on_cpu.take(PATIENCE_SECONDS))
    assert serves(on_cpu.take(PATIENCE_SECONDS))


def test_once_a_worker_has_chosen_the_cpu_later_ones_are_forked(elsewhere: WorkerSupply) -> None:
    before = started_here()
    assert serves(elsewhere.take(PATIENCE_SECONDS))
    elsewhere.prepare("cpu")
    assert len(started_here() - before) == 1
    worker = elsewhere.take(PATIENCE_SECONDS)
    assert len(started_here() - before) == 3
    assert serves(worker)


def test_on_an_accelerator_a_spare_worker_waits(elsewhere: WorkerSupply) -> None:
    before = started_here()
    elsewhere.prepare("cuda:0 NVIDIA H200")
    (spare,) = started_here() - before
    worker = elsewhere.take(PATIENCE_SECONDS)
    assert started_here() - before == {spare}
    assert serves(worker)
    assert is_gone(spare)


def test_a_spare_worker_that_is_killed_is_replaced(elsewhere: WorkerSupply) -> None:
    before = started_here()
    elsewhere.prepare("cuda:0 NVIDIA H200")
    (spare,) = started_here() - before
    os.kill(spare, signal.SIGKILL)
    eventually(lambda: is_gone(spare))
    assert serves(elsewhere.take(PATIENCE_SECONDS))
