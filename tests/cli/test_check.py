"""``batchfinder check``: the same verdicts as the search and the estimate."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from processes import REPOSITORY, idle_bytes

from batchfinder import estimate_max_batch
from batchfinder.cli.app import cli
from batchfinder.training.loading import load_setup
from batchfinder.units import MIB

SMALL = f"{REPOSITORY}/tests/targets/models.py:build_small"


def check(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["check", *arguments])


def test_the_largest_size_of_an_estimate_trains_and_the_next_does_not() -> None:
    setup, _ = load_setup(SMALL, {})
    largest = estimate_max_batch(setup, gpu="t4").batch_size

    ended = check(SMALL, "--gpu", "t4", "--batch-size", str(largest), "--json")
    assert ended.exit_code == 0
    found = json.loads(ended.stdout)
    assert found["trains"]
    assert 0 <= found["margin_bytes"] < found["limit_bytes"] / 100

    refused = check(SMALL, "--gpu", "t4", "--batch-size", str(largest + largest // 50))
    assert refused.exit_code == 3
    assert "does not train on T4 (simulated): its estimated peak of 1" in refused.stdout


def test_a_gpu_may_be_given_by_its_memory_alone() -> None:
    small, large = (
        check(SMALL, "--memory", m, "--batch-size", "200000000") for m in ("2GiB", "80GiB")
    )

    assert (small.exit_code, large.exit_code) == (3, 0)
    assert re.search(
        r"any GPU \(simulated\): its estimated peak of \S+ GiB is \S+ [GM]iB too", small.stdout
    )


def test_the_notes_of_an_estimate_are_lines_of_their_own() -> None:
    ended = check(SMALL, "--gpu", "t4", "--batch-size", "4", "--input", "float32[3]")

    assert ended.exit_code == 0
    doing, note, *_ = ended.stderr.splitlines()
    assert doing == "checking batch size 4 ..."
    assert note.startswith("Note: --input is ignored, as the target brings batches")
    assert "BatchFinderWarning" not in ended.stderr


def test_a_limit_holds_for_a_simulated_gpu_too() -> None:
    size = "--batch-size", str(estimate_max_batch(load_setup(SMALL, {})[0], gpu="t4").batch_size)
    limited = check(SMALL, "--gpu", "t4", *size, "--memory-limit", "2GiB")
    assert limited.exit_code == 3
    assert "A step may use 1.9 GiB" in limited.stdout


def test_what_a_step_lacks_is_told_as_find_tells_it() -> None:
    limit = str(round((idle_bytes() + 45 * MIB) / 0.95))
    hungry = SMALL.replace("small", "hungry")
    refused = check(hungry, "--batch-size", "1", "--device", "cpu", "--memory-limit", limit)
    assert refused.exit_code == 3
    told = r"does not train on cpu.*: it needs at least .* more than the budget. It held .* and"
    assert re.search(told, refused.stdout)


def test_a_budget_of_memory_decides_too() -> None:
    ended = check(SMALL, "--gpu", "t4", "--batch-size", "4", "--max-memory", "100MiB")

    assert ended.exit_code == 3
    assert "A step may use 100.0 MiB" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SMALL, "--batch-size", "0"), "Error: --batch-size must be at least 1, not 0"),
        ((SMALL, "--batch-size", "4", "--gpu", "t5000"), "no GPU 't5000' is known"),
        ((SMALL, "--batch-size", "4", "--gpu", "t4", "--device", "cpu"), "--device is for real"),
        ((SMALL, "--batch-size", "4", "--gpu", "t4", "--compile"), "--compile is for real steps"),
        (
            ("--batch-size", "4", "--gpu", "t4", "--", "python", "{batch_size}"),
            "GPU needs a target",
        ),
        (("--batch-size", "4", "--loader", "a.py:b", "--", "python", "{batch_size}"), "--loader"),
        (("--batch-size", "4", "--lora", "8", "--", "python", "{batch_size}"), "--seq, --lora"),
        (
            ("--batch-size", "4", "--precision", "bf16", "--", "python", "{batch_size}"),
            "--precision is for a target",
        ),
        (("--batch-size", "4", "--", "python", "train.py"), "the command has no {batch_size}"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    ended = check(*arguments)

    assert ended.exit_code == 2
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_an_error_of_the_users_code_is_shown_as_theirs(tmp_path: Path) -> None:
    target = tmp_path / "train.py"
    target.write_text("def build():\n    raise ValueError('mine')\n")

    ended = check(f"{target}:build", "--gpu", "t4", "--batch-size", "4")

    assert ended.exit_code == 1
    assert ended.stderr.endswith("ValueError: mine\nError: ValueError: mine\n")
    assert "batchfinder" not in ended.stderr


def test_a_command_is_checked_by_the_options_that_run_has() -> None:
    script = f"{REPOSITORY}/tests/launching/script.py"
    command = (sys.executable, script, "--batch-size", "{batch_size}", "--manner", "evaluates")
    device = ("--device", "cpu", "--memory-limit", "1GiB")

    ended = check("--batch-size", "16", "--mode", "eval", *device, "--", *command)

    assert ended.exit_code == 0, ended.output
    assert "Batch size 16 trains on cpu" in ended.stdout


def test_the_size_of_a_checked_command_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "size.txt").write_text("{batch_size}")
    script, size = f"{REPOSITORY}/tests/launching/script.py", f"{tmp_path}/size.txt"
    options = ("--device", "cpu", "--memory-limit", "1GiB", "--file", size)

    ended = check("--batch-size", "16", *options, "--", sys.executable, script, "--config", size)

    assert ended.exit_code == 0, ended.output
    assert "Batch size 16 trains on cpu" in ended.stdout
