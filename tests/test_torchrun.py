"""Searches that torchrun has started: one answer, from rank 0, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from marks import FSDP, needs_fully_shard
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]
from warm import start_command

from batchfinder.cli.app import cli
from batchfinder.errors import RankError
from batchfinder.probing.ranks.job import Job
from batchfinder.probing.ranks.meeting import Meeting

TARGETS = Path(__file__).parent / "targets"
FIND = ("find", f"{TARGETS}/on_ranks.py:build", "--device", "cpu")
SEARCH = ("-m", "batchfinder", *FIND)
MARK = "BATCHFINDER_TEST"
PATIENCE_SECONDS = 170


class Torchrun:
    """A job of ranks on this machine."""

    def __init__(self, ranks: int, *command: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"},
        )

    def wait(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, stdout, stderr

    def processes(self) -> Iterator[int]:
        """All that is left of it: whoever has inherited its mark."""
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and self.mark in (folder / "environ").read_text():
                    yield int(folder.name)

    def rank(self, rank: int) -> int:
        """The process that torchrun has started as this rank."""
        for pid in self.processes():
            parent = (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1]
            environment = (Path("/proc") / str(pid) / "environ").read_text().split("\0")
            if int(parent) == self.process.pid and f"RANK={rank}" in environment:
                return pid
        raise AssertionError(f"there is no rank {rank}")

    def is_gone(self) -> bool:
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            if not list(self.processes()):
                return True
            time.sleep(0.1)
        return False


def test_a_rank_alone_asks_for_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    done = CliRunner().invoke(cli, ["find", "train.py:build"])
    assert (done.exit_code, done.output) == (
        2,
        "Error: this is one of 4 ranks: add --strategy ddp or --strategy fsdp\n",
    )
    monkeypatch.setenv("RANK", "3")
    silent = CliRunner().invoke(cli, ["find", "train.py:build"])
    assert (silent.exit_code, silent.output) == (0, "")


@pytest.mark.parametrize("command", ["check", "sweep", "compare", "run"])
def test_only_find_takes_ranks(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    options = {
        "check": ["--batch-size", "4"],
        "sweep": ["--over", "width=1,2"],
        "compare": ["--measure"],
        "run": ["--", "python", "{batch_size}"],
    }
    words = options[command] if command == "run" else [FIND[1], *options[command]]
    done = CliRunner().invoke(cli, [command, *words])
    assert done.exit_code == 2
    assert done.output.startswith("Error: this is one of 2 ranks")


@pytest.mark.parametrize(
    ("refused", "reason"),
    [(("--multiple-of", "0"), "multiple_of must be"), (("--precision", "fp8"), "Invalid value")],
)
def test_a_rank_that_is_refused_before_it_meets_the_others_lets_nobody_wait(
    refused: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    refused_rank = start_command(*FIND, "--strategy", "ddp", *refused, **environment)
    assert refused_rank.communicate() == ("", "")
    assert refused_rank.wait() == 0
    for name, value in {**environment, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    ours, *_ = next(rendezvous("env://"))  # with the prefix that older releases of PyTorch add
    rank_0 = Meeting(Job(0, 2, 0, 2), PrefixStore("0/batchfinder/0", ours), 30)
    with pytest.raises(RankError, match=f"^rank 1 has left the search: {reason}"):
        rank_0.gather("here")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(2, "ddp"), pytest.param(4, "fsdp", marks=needs_fully_shard)]
)
def test_one_answer_for_all_ranks(ranks: int, strategy: str) -> None:
    limit = f"{ranks * 900}MiB"
    job = Torchrun(ranks, *SEARCH, "--strategy", strategy, "--memory-limit", limit, "--json")
    status, stdout, stderr = job.wait()
    assert status == 0, stderr
    answer = json.loads(stdout)
    assert (answer["status"], answer["world_size"]) == ("found", ranks)
    assert len(answer["rank_peak_bytes"]) == ranks
    assert answer["device"] == (f"{ranks} x cpu ({strategy}), each with 1/{ranks} of the memory")
    assert stderr.count("fits, confirmed") == sum(
        probe["confirmed"] and probe["outcome"] == "fits" for probe in answer["probes"]
    )
    assert job.is_gone()


@pytest.mark.slow
def test_one_rank_is_enough_but_told() -> None:
    job = Torchrun(
        1, *SEARCH, "--strategy", "fsdp", "--max-batch-size", "4", "--global-batch-size", "64"
    )
    status, stdout, stderr = job.wait()
    assert status == 0, stderr
    assert "Warning: there is only one rank" in stderr
    assert stdout.startswith("Max batch size 4")
    assert stdout.splitlines()[-1] == "Global batch 64 = 4 per device x 16 accumulation steps"
    assert job.is_gone()


@pytest.mark.slow
def test_what_goes_wrong_is_told_once() -> None:
    job = Torchrun(2, *SEARCH, "--strategy", "ddp", "--arg", "deed=raise")
    status, stdout, stderr = job.wait()
    assert (status, stdout) == (1, "")
    assert stderr.count("Error: on rank 1: ValueError: no such width") == 1
    assert job.is_gone()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", FSDP])
def test_a_rank_killed_in_a_probe_ends_the_job_and_all_that_it_started(
    strategy: str, tmp_path: Path
) -> None:
    at_it = tmp_path / "at_it"
    job = Torchrun(
        2, *SEARCH, "--strategy", strategy, "--arg", "deed=hang", "--arg", f"once={at_it}"
    )
    while not at_it.exists():
        assert job.process.poll() is None
        time.sleep(0.1)
    os.kill(job.rank(1), signal.SIGKILL)
    started = time.monotonic()
    status, _, _ = job.wait()
    assert status == 1
    assert time.monotonic() - started < 40  # torchrun gives the others 30 s to end
    assert job.is_gone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "batch_size"),
    [("here", 5), ("holes", 5), ("gathers", 5), ("bare", 5), ("worker", 8)],
)
def test_a_users_own_script(what: str, batch_size: int) -> None:
    """With "holes", a rank needs more than the limit while the others wait for its gradients.

    With "gathers", the others wait for it in a collective of the model.
    """
    job = Torchrun(2, str(TARGETS / "own_script.py"), what)
    status, stdout, stderr = job.wait()
    assert status == 0, stderr
    first, second = json.loads(stdout)
    assert first == second
    assert (first["batch_size"], first["world_size"]) == (batch_size, 2)
    assert job.is_gone()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "why", "strategy"),
    [
        ("sharded", "is sharded already", "fsdp"),
        ("sharded by the first FSDP", "is sharded already", "fsdp"),
        ("synchronized", "has SyncBatchNorm", "ddp"),
    ],
)
def test_a_model_whose_ranks_wait_within_its_passes_is_refused_with_what_to_do(
    what: str, why: str, strategy: str
) -> None:
    job = Torchrun(2, str(TARGETS / "own_script.py"), what)
    status, stdout, stderr = job.wait()
    assert (status, stdout) == (0, "")
    assert stderr.count(f"UsageError: the model {why}") == 2
    assert "Try torchrun --nproc-per-node N -m batchfinder find FILE.py:FUNCTION" in stderr
    assert f"--strategy {strategy} with" in stderr
    assert job.is_gone()
