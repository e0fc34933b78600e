"""Where workers come from: forked where training runs on the CPU, else started one ahead."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from processes import PATIENCE_SECONDS, descendants, eventually, is_gone

from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.process import WorkerProcess
from batchfinder.probing.worker_supply import WorkerSupply

ORDER: dict[str, Any] = {
    "target": "batchfinder.no_such_module:build",
    "arguments": {},
    "options": ProbeOptions(device="cpu").to_dict(),
    "group": None,
    "sample": None,
    "input_spec": None,
    "optimizer": None,
}


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
    worker.send(ORDER)
    try:
        return worker.receive(PATIENCE_SECONDS)["kind"] == "UsageError"
    finally:
        worker.kill()


def started_here() -> set[int]:
    return set(descendants(os.getpid()))


def test_on_the_cpu_one_process_imports_pytorch_for_all_workers(on_cpu: WorkerSupply) -> None:
    before = started_here()
    first, second = on_cpu.take(), on_cpu.take()
    # The fork server, and for each worker itself and the process that waits for its end.
    assert len(started_here() - before) == 1 + 2 * 2
    assert serves(second)
    assert serves(first)


def test_a_forked_worker_is_ended_with_all_that_it_started(on_cpu: WorkerSupply) -> None:
    before = started_here()
    worker = on_cpu.take()
    assert worker.is_alive()
    worker.kill()
    assert not worker.is_alive()
    eventually(lambda: len(started_here() - before) == 1)
    on_cpu.close()
    eventually(lambda: started_here() == before)


def test_a_fork_server_that_is_killed_is_replaced(on_cpu: WorkerSupply) -> None:
    before = started_here()
    assert serves(on_cpu.take())
    eventually(lambda: len(started_here() - before) == 1)
    (server,) = started_here() - before
    os.kill(server, signal.SIGKILL)
    assert serves(on_cpu.take())
    assert serves(on_cpu.take())


def test_once_a_worker_has_chosen_the_cpu_later_ones_are_forked(elsewhere: WorkerSupply) -> None:
    before = started_here()
    assert serves(elsewhere.take())
    elsewhere.prepare("cpu")
    assert len(started_here() - before) == 1
    worker = elsewhere.take()
    assert len(started_here() - before) == 3
    assert serves(worker)


def test_on_an_accelerator_a_spare_worker_waits(elsewhere: WorkerSupply) -> None:
    before = started_here()
    elsewhere.prepare("cuda:0 NVIDIA H200")
    (spare,) = started_here() - before
    worker = elsewhere.take()
    assert started_here() - before == {spare}
    assert serves(worker)
    assert is_gone(spare)


def test_a_spare_worker_that_is_killed_is_replaced(elsewhere: WorkerSupply) -> None:
    before = started_here()
    elsewhere.prepare("cuda:0 NVIDIA H200")
    (spare,) = started_here() - before
    os.kill(spare, signal.SIGKILL)
    eventually(lambda: is_gone(spare))
    assert serves(elsewhere.take())
