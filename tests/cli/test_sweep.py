"""``batchfinder sweep``, as a user types it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchfinder.cli.app import cli

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
GPT = f"{EXAMPLES / 'train_gpt.py'}:build_model"
SMALL = ("--arg", "width=16", "--arg", "depth=1", "--memory", "4GiB")

WITH_MAKE_BATCH = """
import torch
from torch import nn
from batchfinder import TrainingSetup

def build_setup(width=8):
    def make_batch(batch_size, length=4):
        return torch.randn(batch_size, length, width), torch.randn(batch_size, length, width)
    return TrainingSetup(nn.Linear(width, width), make_batch=make_batch)
"""


def sweep(target: str, *options: str) -> Result:
    return CliRunner().invoke(cli, ["sweep", target, *options])


def test_a_table_and_what_to_paste() -> None:
    done = sweep(GPT, *SMALL, "--over", "max_tokens=64,128")

    assert done.exit_code == 0, done.output
    table, paste = done.stdout.split("\n\n")
    title, head, *rows = table.splitlines()
    assert title.startswith("any GPU, budget ")
    assert head.split()[:4] == ["max_tokens", "max", "batch", "tokens"]
    sizes = [int(row.split()[1]) for row in rows]
    alone, budget, pairs, lhotse, nemo = paste.splitlines()
    assert alone.startswith("# For each length alone.")
    assert re.match(rf"max_tokens = {min(64 * sizes[0], 128 * sizes[1])}  # ", budget)
    assert pairs.startswith(f"batch_sizes = {{64: {sizes[0]}, 128: {sizes[1]}}}")
    assert f"max_seq_len_buckets=[64, 128], batch_sizes=[{sizes[0]}, {sizes[1]}])" in lhotse
    assert (
        nemo == f"NeMo: bucket_duration_bins=[64, 128] bucket_batch_size=[{sizes[0]}, {sizes[1]}]"
    )


@pytest.mark.slow
def test_json_on_the_device_has_the_probes_of_every_value() -> None:
    done = sweep(GPT, "--device", "cpu", "--over", "max_tokens=8,16", "--max-batch-size", "4",
                 "--json")  # fmt: skip
    data = json.loads(done.stdout)
    assert [row["max_tokens"] for row in data["rows"]] == [8, 16]
    assert all(row["batch_size"] == 4 and row["confirmed_steps"] >= 6 for row in data["rows"])
    assert data["number_of_probes"] == sum(len(row["probes"]) for row in data["rows"])
    assert data["max_tokens"] == 32
    assert "  max_tokens=8: batch size 4, " in done.stderr


def test_a_report_has_a_picture_and_a_table(tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    done = sweep(GPT, *SMALL, "--over", "max_tokens=8,16", "--max-batch-size", "4", "--report",
                 str(page))  # fmt: skip
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "max_tokens = 32 is safe at all lengths" in text
    assert "batch_sizes = {8: 4, 16: 4}  # by the longest in the bucket</pre>" in text
    assert "beside the CUDA context, which the peaks include" in text
    assert "Largest batch size" in text
    assert ">16</th>" in text


def test_a_length_that_does_not_fit_is_named_everywhere(tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"
    done = sweep(GPT, *SMALL, "--over", "max_tokens=8,16,1000000", "--max-batch-size", "4",
                 "--report", str(page))  # fmt: skip
    why = "there is no max_tokens for all lengths, as nothing trains at max_tokens=1000000"
    assert f"Note: {why}" in done.stderr
    assert f"<p>Note: {why}</p>" in page.read_text()
    assert "max_tokens = " not in done.stdout
    assert "batch_sizes = {8: 4, 16: 4}" in done.stdout


def test_make_batch_of_the_target_may_take_the_argument(tmp_path: Path) -> None:
    file = tmp_path / "with_make_batch.py"
    file.write_text(WITH_MAKE_BATCH)
    target = f"{file}:build_setup"
    done = sweep(target, "--over", "length=4,8", "--gpu", "t4", "--max-batch-size", "8", "--json")
    assert [row["length"] for row in json.loads(done.stdout)["rows"]] == [4, 8]
    wrong = sweep(target, "--over", "lenght=4,8", "--gpu", "t4")
    assert wrong.exit_code == 2
    assert "takes no argument lenght; did you mean length?" in wrong.stderr


def test_a_loader_that_the_argument_does_not_reach_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "with_loader.py"
    file.write_text(
        "import torch\n"
        "def build(size=1):\n"
        "    return torch.nn.Linear(8, 8), torch.randn(2, size, 8)\n"
        "def fixed():\n"
        "    return [torch.randn(3, 8)] * 9\n"
        "def fitting(size=1):\n"
        "    return [torch.randn(size, 8)] * 9\n"
    )
    options = ("--over", "size=2,4", "--gpu", "t4", "--max-batch-size", "4", "--loader")
    note = f"Note: {file}:fixed takes no size, so the examples are the same at each value."
    assert note in sweep(f"{file}:build", *options, f"{file}:fixed").stderr
    assert "takes no" not in sweep(f"{file}:build", *options, f"{file}:fitting").stderr


@pytest.mark.parametrize("device", [("--gpu", "t4"), ("--device", "cpu")])
def test_a_signal_leaves_the_rows_that_ended(device: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "interrupted.py"
    file.write_text(
        "import os, torch\n"
        "def build(size=1):\n"
        "    if size == 1:  # the smallest ends after the largest\n"
        f"        os.kill(os.getpid(), {int(signal.SIGINT)})\n"
        "    return torch.nn.Linear(8, 8), torch.randn(2, size, 8)\n"
    )
    done = sweep(f"{file}:build", "--over", "size=4,1,2", *device, "--max-batch-size", "4")
    assert done.exit_code == 130, done.output
    rows = [line.split()[:2] for line in done.stdout.partition("\n\n")[0].splitlines()[2:]]
    assert rows == [["4", "4"]]


@pytest.mark.parametrize(
    ("device", "lines"),
    [
        (("--gpu", "t4"), ["length=4: tracing ..."]),
        (
            ("--device", "cpu"),
            ["length=4: loading ...", "length=8: trying 1 ...", "length=8: confirming 4 ...",
             "all values in turn: confirming 100 % ..."],
        ),
    ],
)  # fmt: skip
def test_a_terminal_and_a_pipe_show_what_runs_now(
    device: tuple[str, str], lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "with_make_batch.py"
    file.write_text(WITH_MAKE_BATCH)
    options = (f"{file}:build_setup", "--over", "length=4,8", *device, "--max-batch-size", "4")
    plain = sweep(*options).stderr
    assert "\r" not in plain
    starts = [line.partition(":")[0] for line in plain.splitlines() if line.endswith(" ...")]
    assert {*starts} >= {line.partition(":")[0] for line in lines}
    assert len(starts) == len({*starts})  # no line for each probe
    assert sweep(*options, "-q").stderr == ""
    monkeypatch.setattr("os.isatty", lambda descriptor: True)
    shown = sweep(*options).stderr
    assert all(f"\r{line}" in shown for line in lines), shown
    assert shown.count("\r  length=") == 2  # the line is cleared before each row


def test_in_a_pipe_the_table_is_as_wide_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    done = sweep(GPT, *SMALL, "--over", "max_tokens=8", "--max-batch-size", "4")
    table = done.stdout.partition("\n\n")[0].splitlines()[1:]
    assert table[:2] == ["max_tokens  8", "max batch   4"]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--over", "max_tokens"), 2, "cannot be read. Try --over seq_len=512,1024,2048."),
        (("--over", "max_token=4,8"), 2, "takes no argument max_token; did you mean max_tokens?"),
        (("--over", "vocabulary=-1,-2"), 1, "Error: RuntimeError: "),
        (("--over", "depth=1,2", "--arg", "depth=3"), 2, "depth is in --over and in --arg. Try"),
        (("--over", "depth=1,2", "--device", "cpu"), 2, "--device is for real steps"),
        (("--over", "depth=1", "--over", "depth=2"), 2, "--over depth is given twice."),
    ],
)
def test_errors_are_one_clear_line(options: tuple[str, ...], status: int, message: str) -> None:
    done = sweep(GPT, *options, "--gpu", "t4")
    assert (done.exit_code, message in done.stderr.splitlines()[-1]) == (status, True), done.output
