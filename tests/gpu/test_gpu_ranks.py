"""Ranks on GPUs with NCCL. One GPU is enough for a job of one rank."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from gpu.models import LIMIT, needs_cuda, needs_two_gpus
from processes import REPOSITORY, run_python

pytestmark = needs_cuda

TARGETS = REPOSITORY / "tests" / "targets"
GPUS = torch.cuda.device_count()


def torchrun(ranks: int, *command: str) -> str:
    """What a job prints."""
    return run_python("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *command)


def find(ranks: int, target: str, strategy: str, *options: str) -> dict[str, Any]:
    """What a search on several ranks answers."""
    command = ("-m", "batchfinder", "find", target, "--device", "cuda", "--json")
    printed = torchrun(ranks, *command, "--strategy", strategy, *options)
    answer: dict[str, Any] = json.loads(printed)
    return answer


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_job_of_one_rank(strategy: str, precision: str) -> None:
    answer = find(
        1,
        "tests/gpu/models.py:build_wide",
        strategy,
        *("--memory-limit", LIMIT, "--precision", precision),
    )
    assert (answer["status"], answer["world_size"]) == ("found", 1)
    assert answer["next_failure"]["outcome"] == "oom"
    assert answer["rank_peak_bytes"][0] <= answer["budget_bytes"]


@needs_two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_find_what_fits_on_each(strategy: str) -> None:
    answer = find(GPUS, "tests/gpu/models.py:build_wide", strategy, "--memory-limit", LIMIT)
    assert (answer["status"], answer["world_size"]) == ("found", GPUS)
    assert answer["next_failure"]["outcome"] == "oom"
    assert len(answer["rank_peak_bytes"]) == GPUS


@needs_two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_one_rank_out_of_memory_leaves_none_waiting(phase: str, strategy: str) -> None:
    answer = find(
        2,
        f"{TARGETS}/on_ranks.py:build",
        strategy,
        *("--arg", "deed=oom", "--arg", f"phase={phase}", "--arg", "at=3"),
        *("--max-batch-size", "4"),
    )
    assert (answer["batch_size"], answer["limiting_rank"]) == (2, 1)


@needs_two_gpus
def test_a_users_own_script_on_its_own_devices() -> None:
    first, second = json.loads(torchrun(2, str(TARGETS / "own_script.py"), "here", "cuda"))
    assert first == second
    assert (first["batch_size"], first["world_size"]) == (5, 2)


def test_a_users_own_script_on_one_device() -> None:
    (only,) = json.loads(torchrun(1, str(TARGETS / "own_script.py"), "here", "cuda"))
    assert (only["batch_size"], only["status"]) == (8, "capped")
