"""One worker process, from its start to its end."""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS, descendants, eventually, is_gone, order
from warm import WARM_WORKERS, WarmPython

from batchfinder.errors import WorkerDiedError, WorkerHungError
from batchfinder.probing.workers.process import WorkerProcess

TARGETS = Path(__file__).parents[2] / "targets"


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    ours = WorkerProcess(show_output=False)
    yield ours
    ours.kill()


def test_without_an_order_it_waits(process: WorkerProcess) -> None:
    with pytest.raises(WorkerHungError):
        process.receive(0.1)


def test_it_answers_in_order_and_then_waits_for_the_next_one(process: WorkerProcess) -> None:
    process.send(order(f"{TARGETS}/models.py:build_small"))
    assert process.receive(PATIENCE_SECONDS)["answer"] == "ready"
    process.send({"id": 2, "batch_size": 2, "confirm": False})
    answers = [process.receive(PATIENCE_SECONDS) for _ in range(3)]
    assert [answer["answer"] for answer in answers] == ["step", "step", "attempt"]
    assert answers[-1]["attempt"]["probe"]["batch_size"] == 2
    assert answers[-1]["attempt"]["is_believed"] is True
    assert {answer["to"] for answer in answers} == {2}


@pytest.mark.usefixtures("warm_workers")
def test_after_an_error_it_ends_itself(process: WorkerProcess) -> None:
    process.send(order(f"{TARGETS}/models.py:no_such_function"))
    answer = process.receive(PATIENCE_SECONDS)
    assert (answer["answer"], answer["kind"]) == ("error", "UsageError")
    assert "models.py has no function no_such_function" in answer["message"]
    with pytest.raises(WorkerDiedError, match="exited with status 1"):
        process.receive(PATIENCE_SECONDS)


def test_it_ends_with_a_parent_that_is_killed_within_an_order(process: WorkerProcess) -> None:
    stdin = process._process.stdin
    assert stdin is not None
    stdin.write(b'{"id": 1, "opti')
    stdin.close()
    with pytest.raises(WorkerDiedError):
        process.receive(PATIENCE_SECONDS)


@pytest.mark.usefixtures("warm_workers")
def test_what_it_printed_last_is_told_with_its_death(process: WorkerProcess) -> None:
    process.send(order(f"{TARGETS}/deaths.py:build_and_do", deed="complain_and_abort"))
    with pytest.raises(WorkerDiedError) as death:
        process.receive(PATIENCE_SECONDS)
    assert death.value.signal_number == signal.SIGABRT
    assert "std::bad_alloc" in death.value.output


@pytest.mark.usefixtures("warm_workers")
def test_it_goes_on_where_nobody_reads_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    process = WorkerProcess(show_output=True)
    process.send(order(f"{TARGETS}/deaths.py:build_and_do", deed="print"))
    # It prints more than a pipe holds, and then finds that there is no sample.
    assert "no example batch" in process.receive(PATIENCE_SECONDS)["message"]
    process.kill()


def test_it_can_be_killed_twice() -> None:
    process = WorkerProcess(show_output=False)
    process.kill()
    process.kill()
    with pytest.raises(WorkerDiedError):
        process.receive(PATIENCE_SECONDS)


@pytest.mark.parametrize("deed", ["hang", "leave_a_child_and_hang"])
def test_when_its_parent_is_killed_it_ends_with_all_that_it_started(
    deed: str, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    program = f"""
from processes import supervisor
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.setup_source import SetupSource
arguments = {{"deed": {deed!r}, "once": {str(pids)!r}}}
source = SetupSource({str(TARGETS / "deaths.py:build")!r}, arguments)
supervisor(source, ProbeOptions(device="cpu")).probe(1)
"""
    tests = str(TARGETS.parent)
    parent = WarmPython("-c", WARM_WORKERS + program, PYTHONPATH=tests)
    eventually(pids.exists)
    time.sleep(0.2)  # for the child to be there
    started = descendants(parent.pid)
    worker = int(pids.read_text())
    assert worker in started
    assert len(descendants(worker)) == (deed == "leave_a_child_and_hang")
    parent.kill()
    parent.communicate()
    eventually(lambda: all(is_gone(pid) for pid in started))
