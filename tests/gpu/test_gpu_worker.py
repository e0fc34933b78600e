"""Searches in worker processes: a poisoned CUDA context costs a worker, not the search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu.models import DEVICE, LIMIT, ROWS, needs_cuda
from processes import run_python

pytestmark = needs_cuda


def find(target: str, *options: str) -> dict[str, Any]:
    """What the command line answers, for a target beside this file."""
    options = ("--device", DEVICE, "--memory-limit", LIMIT, "--json", *options)
    printed = run_python("-m", "batchfinder", "find", f"tests/gpu/models.py:{target}", *options)
    answer: dict[str, Any] = json.loads(printed)
    return answer


def test_a_device_side_assert_bounds_the_size_and_is_no_out_of_memory() -> None:
    answer = find("build_breaking", "--min-batch-size", "97", "--max-batch-size", "104")

    assert (answer["batch_size"], answer["status"]) == (ROWS, "found")
    assert answer["next_failure"]["batch_size"] == ROWS + 1
    assert answer["next_failure"]["outcome"] == "failed"
    assert "device-side assert" in answer["next_failure"]["reason"]


BREAK_THIS_PROCESS = f"""
import os
import batchfinder
from gpu.models import build_breaking
model, sample = build_breaking()
try:
    batchfinder.find_max_batch(model, sample, device="{DEVICE}", min_batch_size={ROWS + 1})
except batchfinder.BatchFinderError as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)  # what else a broken context does on the way out is not asked for
"""


def test_a_device_side_assert_in_this_process_is_one_clear_error() -> None:
    printed = run_python("-c", BREAK_THIS_PROCESS)

    assert printed.startswith(f"DeviceError a batch of {ROWS + 1} broke the device ")
    assert "device-side assert" in printed
    assert "batchfinder find" in printed


TARGET = """
from gpu.models import wide_model, wide_sample

def build():
    with open({notes!r}, "a") as notes:
        notes.write("loaded\\n")
    return wide_model(), wide_sample()
"""


def test_a_worker_starts_over_by_itself_however_often_it_confirms(tmp_path: Path) -> None:
    notes, target = tmp_path / "notes", tmp_path / "train.py"
    target.write_text(TARGET.format(notes=str(notes)))
    options = ("--device", DEVICE, "--memory-limit", LIMIT, "--json")
    answer = json.loads(run_python("-m", "batchfinder", "find", f"{target}:build", *options))

    assert sum(probe["confirmed"] for probe in answer["probes"]) >= 1
    assert {probe["outcome"] for probe in answer["probes"]} == {"fits", "oom"}
    assert notes.read_text() == "loaded\n"


FIND_IN_PROCESS = f"""
from batchfinder import find_max_batch
from gpu.models import wide_model, wide_sample
result = find_max_batch(wide_model(), wide_sample(), device="{DEVICE}", memory_limit="{LIMIT}")
print(result.batch_size)
"""


def test_the_command_line_and_a_call_agree() -> None:
    by_command = find("build_wide")
    # In a fresh process: what earlier tests left in this one's allocator moves the answer.
    by_call = int(run_python("-c", FIND_IN_PROCESS))

    assert by_command["next_failure"]["outcome"] == "oom"
    assert abs(by_command["batch_size"] / by_call - 1) < 0.02
