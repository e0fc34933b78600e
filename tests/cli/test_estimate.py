from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from batchfinder.cli.app import cli

TRAIN = """
import batchfinder
import torch
from torch import nn

def build_model(width=256):
    sample = torch.randn(3, width), torch.randint(0, 10, (3,))
    return nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10)), sample

def broken():
    raise RuntimeError("no such file")

class Misfit(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return self.inner(x) @ torch.ones(3, 3)

def too_large_for_the_host():
    with torch.device("meta"):
        model = nn.Linear(4, 2**44)
    return model.to_empty(device="cpu")

def misfit():
    return Misfit(), (torch.randn(2, 4), torch.randn(2, 4))

autocast = torch.autocast("cuda", dtype=torch.bfloat16)

def talkative(is_cast=True, width=16):
    print("here I am")
    def step(model, batch):
        with autocast if is_cast else torch.autocast("cuda", enabled=False):
            loss = model(batch[0]).mean()
        print(f"loss {loss:.3f}")
        return loss
    return batchfinder.TrainingSetup(*build_model(width), step=step)
"""


@pytest.fixture
def train_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHFINDER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "train_for_estimate.py"
    path.write_text(TRAIN)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def estimate(target: str, *arguments: object) -> Any:
    result = run("estimate", target, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["estimates"]


def test_output_of_the_target_goes_to_stderr(train_file: Path) -> None:
    result = run("estimate", f"{train_file}:talkative", "--gpu", "t4", "--json", "-q")
    assert json.loads(result.stdout)["estimates"]
    assert result.stderr.startswith("here I am\nloss 0.000\n")


def test_what_is_estimated_is_shown_meanwhile(
    train_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{train_file}:build_model"
    words = "estimate", target, "--gpu", "t4"
    line = f"estimating {target} ..."
    assert run(*words).stderr == f"{line}\n"
    assert run(*words, "--quiet").stderr == ""
    monkeypatch.setattr("batchfinder.cli.output.os.isatty", lambda _: True)
    # The runner drops the code that clears the line.
    assert run(*words).stderr == f"\r{line[:79]}\r"
    assert run(*words, "--quiet").stderr == ""
    monkeypatch.setenv("TERM", "dumb")
    assert run(*words).stderr == f"{line}\n"


def test_quiet_prints_no_notes(train_file: Path) -> None:
    words = "estimate", f"{train_file}:build_model", "--gpu", "t4", "--min-batch-size", "99999999"
    said, quiet = run(*words), run(*words, "-q")
    assert said.exit_code == quiet.exit_code == 3
    assert "Note: Try compare" in said.stderr
    assert (quiet.stdout, quiet.stderr) == (said.stdout, "")


def test_an_autocast_at_module_level_is_on(train_file: Path) -> None:
    on, off = (
        estimate(f"{train_file}:talkative", "--gpu", "t4", "--arg", f"is_cast={is_cast}")[0]
        for is_cast in (True, False)
    )
    assert on["batch_size"] > 1.2 * off["batch_size"]


def test_a_row_for_each_gpu(train_file: Path) -> None:
    result = run("estimate", f"{train_file}:build_model", "--gpu", "t4", "--gpu", "h100")

    assert result.exit_code == 0
    head, first, second = result.stdout.splitlines()
    assert head.split()[:4] == ["GPU", "memory", "max", "batch"]
    assert first.startswith("T4 ")
    assert second.startswith("H100 SXM ")


def test_a_gpu_named_twice_has_one_row(train_file: Path) -> None:
    result = run("estimate", f"{train_file}:build_model", "--gpu", "t4", "--gpu", "T4")
    assert len(result.stdout.splitlines()) == 2


@pytest.mark.parametrize("columns", [20, 40])
def test_on_a_narrow_terminal_each_gpu_is_a_paragraph(
    train_file: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.isatty", lambda descriptor: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run("estimate", f"{train_file}:build_model", "--gpu", "t4", "--gpu", "h100")
    first, second = result.stdout.split("\n\n")
    assert first.splitlines()[0].split() == ["GPU", "T4"]
    assert second.splitlines()[0].split() == ["GPU", "H100", "SXM"]
    assert [line.split()[:2] for line in first.splitlines()][2] == ["max", "batch"]


def test_explain_lists_the_terms_of_the_peak(train_file: Path) -> None:
    result = run(
        "estimate", f"{train_file}:build_model", "--memory", "8GiB", "--explain",
        "--arg", "width=64",
    )  # fmt: skip

    assert result.exit_code == 0
    for term in ("parameters", "optimizer states", "activations", "context and libraries"):
        assert term in result.stdout


def test_json_holds_raw_bytes(train_file: Path) -> None:
    [found] = estimate(f"{train_file}:build_model", "--gpu", "t4", "--overhead", "512MiB")

    assert found["gpu"]["overhead_bytes"] == 512 * 2**20
    assert found["interval"][0] <= found["batch_size"] <= found["interval"][1]
    assert found["peak_bytes"] == sum(found["explanation"]["terms"].values())


def test_the_overhead_may_be_zero(train_file: Path) -> None:
    target = f"{train_file}:build_model"
    [known] = estimate(target, "--gpu", "t4")
    [none] = estimate(target, "--gpu", "t4", "--overhead", "0")

    assert (
        none["gpu"]["overhead_bytes"] == none["explanation"]["terms"]["context and libraries"] == 0
    )
    assert none["batch_size"] > known["batch_size"]


def test_nothing_fits_exits_with_3(train_file: Path) -> None:
    result = run(
        "estimate", f"{train_file}:build_model", "--memory", "1960MiB", "--arg", "width=200000"
    )

    assert result.exit_code == 3
    peak, unit = result.stdout.split("none fits     0 .. 0")[1].split()[:2]
    assert (unit, float(peak) > 1960 / 1024) == ("GiB", True)  # of the smallest size


def test_a_gpu_on_which_nothing_fits_beside_a_larger_one_is_named(train_file: Path) -> None:
    target = f"{train_file}:build_model"
    gpus = ("--gpu", "t4", "--gpu", "h200")
    result = run("estimate", target, *gpus, "--overhead", "14GiB", "--arg", "width=1000000")

    assert result.exit_code == 0
    assert "Note: nothing fits on T4. Try --gpu T4 alone" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("build_model",), 2, "Error: no GPU is given. Try --gpu rtx3090"),
        (("build_model", "--gpu", "rtx309"), 2, "did you mean RTX 3090"),
        (("broken", "--gpu", "t4"), 1, "Error: RuntimeError: no such file"),
        (("too_large_for_the_host", "--gpu", "t4"), 1, "Try to build the model with torch.device("),
        (("misfit", "--gpu", "t4"), 1, "must have same reduction dim"),
        (("build_model", "--gpu", "t4", "--calibrate", "no.json"), 2, "no.json cannot be read"),
    ],
)
def test_errors_are_one_clear_line(
    train_file: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    target, *options = arguments
    result = run("estimate", f"{train_file}:{target}", *options)

    assert result.exit_code == status
    assert message in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("allocator", "outside_bytes"), [((), None), ((), 2**31), (("--expandable-segments",), None)]
)
def test_a_measurement_corrects_the_overhead(
    train_file: Path, allocator: tuple[str, ...], outside_bytes: int | None
) -> None:
    target = f"{train_file}:build_model"
    [before] = estimate(target, "--gpu", "h200", *allocator)
    half = str(before["batch_size"] // 2)  # with room to spare, where nothing flushes the cache
    [capped] = estimate(target, "--gpu", "h200", "--max-batch-size", half, *allocator)
    (probe,) = (p for p in capped["probes"] if p["batch_size"] == capped["batch_size"])
    probe["peak_reserved_bytes"] += 2**30
    measured = {
        "budget_bytes": before["budget_bytes"],
        "device": "cuda:0 NVIDIA H200",
        "probes": [{**probe, "outside_bytes": outside_bytes}],
    }
    result_file = train_file.with_name("result.json")
    result_file.write_text(json.dumps(measured))

    [after] = estimate(target, "--gpu", "h200", "--calibrate", result_file, *allocator)
    [kept] = estimate(target, "--gpu", "h200")
    [forgotten] = estimate(target, "--gpu", "h200", "--forget-calibration")

    overhead = outside_bytes or before["gpu"]["overhead_bytes"]
    assert abs(after["gpu"]["overhead_bytes"] - overhead - 2**30) <= 2**21
    assert kept["gpu"] == after["gpu"]
    assert forgotten["gpu"] == before["gpu"]


def test_a_measurement_that_lacks_the_overhead_is_said(train_file: Path) -> None:
    result_file = train_file.with_name("result.json")
    probe: dict[str, Any] = {"batch_size": 2, "outcome": "fits", "peak_reserved_bytes": 2**30}
    measured = {"budget_bytes": 2**34, "device": "cuda:0 Tesla T4", "probes": [probe]}
    for outside_bytes, line in ((None, "still assumed, as"), (2**29, "512.0 MiB, as measured")):
        probe["outside_bytes"] = outside_bytes
        result_file.write_text(json.dumps(measured))
        target = f"{train_file}:build_model"
        result = run("estimate", target, "--gpu", "t4", "--calibrate", str(result_file))
        assert line in result.stderr


def test_gpus_are_listed() -> None:
    assert "RTX 3090" in run("gpus").stdout
    assert len(json.loads(run("gpus", "--json").stdout)) >= 30
