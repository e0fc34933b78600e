"""``batchfinder compare``, as a user types it."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchfinder.cli.app import cli

MLP = Path(__file__).parents[2] / "scripts" / "examples" / "train_mlp.py"
SMALL = ("--arg", "width=16", "--arg", "depth=2", "--memory", "4GiB")


def compare(*options: str, target: str = f"{MLP}:build_model") -> Result:
    return CliRunner().invoke(cli, ["compare", target, *options])


def test_a_table_a_legend_and_the_equation() -> None:
    done = compare(
        *SMALL, "--strategy", "bf16+checkpointing", "--strategy", "ddp", "--world-size", "8",
        "--global-batch-size", "4099", "--explain",
    )  # fmt: skip

    assert done.exit_code == 0, done.output
    table, equation = done.stdout.split("\n\n")
    title, head, base, changed, ranks, legend = table.splitlines()
    assert title.startswith("any GPU, budget ")
    assert title.endswith("; as it is: fp32, AdamW, gradient accumulation")
    assert re.split(r"\s{2,}", head) == [
        "strategy", "max batch", "peak", "model states", "per sample", "for 4099", "note",
    ]  # fmt: skip
    assert base.startswith("as it is ")
    assert re.search(r"^bf16 \+ checkpointing .* x\d\.\d\d .* 4099 x 1  <- largest", changed)
    # No split over eight ranks reaches it.
    assert ranks.endswith("512 x 1 x 8  makes 4096, not 4099")
    assert legend == "checkpointing: 2 x Sequential (blocks.0 to blocks.1)"
    rows = [line.split("  ")[0] for line in equation.splitlines()]
    assert {"memory at", "parameters", "activations", "= peak", "per sample"} < {*rows}


def test_on_a_narrow_terminal_the_numbers_stand_in_columns_below_the_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = compare(*SMALL, "--strategy", "bf16+checkpointing", "--max-batch-size", "8")
    [_, names, head, base, sizes, changed, more_sizes, _] = done.stdout.splitlines()
    assert (names, base) == ("strategy  note", "as it is  <- largest")
    assert head.split("  ")[1] == "max batch"
    assert changed == "bf16 + checkpointing"
    assert {len(line) for line in (head, sizes, more_sizes)} == {len(head)}


def test_json_and_report_have_a_row_for_each_strategy_and_gpu(tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    done = compare(*SMALL[:4], "--gpu", "t4", "--gpu", "v100 16gb", "--strategy", "sgd", "--json",
                   "--max-batch-size", "8", "--report", str(page))  # fmt: skip
    # Each GPU has two tables: the sizes, and what uses the memory.
    assert page.read_text().count('data-name="strategy">sgd</th>') == 2 * 2
    lead = "which the peaks include · as it is: fp32, AdamW · largest: sgd</p>"
    assert page.read_text().count(lead) == 2
    data = json.loads(done.stdout)
    assert [one["device"] for one in data["comparisons"]] == ["T4", "V100 16GB"]
    assert [row["strategy"] for row in data["comparisons"][0]["rows"]] == ["as it is", "sgd"]


def test_what_runs_now_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    options = (*SMALL, "--strategy", "sgd", "--max-batch-size", "8")
    plain = compare(*options).stderr.splitlines()
    assert plain[0].startswith("loading ")
    *shown, note = plain[1:]
    assert shown == ["tracing as it is ...", "tracing sgd ..."]
    assert note.startswith("Note: of any GPU, only the memory is known. Assumed are ")
    assert compare(*options, "-q").stderr == ""
    monkeypatch.setattr("os.isatty", lambda descriptor: True)
    assert "\rtracing as it is ...\rtracing sgd ...\r" in compare(*options).stderr


@pytest.mark.slow
def test_measured_rows_are_timed() -> None:
    tiny = ("--arg", "width=16", "--arg", "depth=1")
    done = compare(
        *tiny, "--measure", "--device", "cpu", "--max-batch-size", "4", "--strategy", "sgd"
    )
    assert done.exit_code == 0, done.output
    assert {"samples/s", "per 1,000"} < {*re.split(r"\s{2,}", done.stdout.splitlines()[1])}
    assert "<- fastest" in done.stdout
    assert "  as it is: batch size 4, " in done.stderr


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ((), 2, "no device is given. Try --gpu rtx3090, --memory 24GiB, or --measure."),
        (("--measure", "--explain"), 2, "--explain needs an estimate. Try it with --gpu rtx3090."),
        (("--gpu", "t4", "--device", "cpu"), 2, "--device is for real steps, and --gpu simulates"),
        (("--gpu", "t4", "--strategy", "checkpoint"), 2, "did you mean checkpointing"),
        (("--gpu", "t4", "--strategy", "fsdp"), 2, "fsdp needs several ranks. Try --world-size 8."),
        (("--gpu", "t4", "--arg", "widht=3"), 2, "takes no argument widht; did you mean width?"),
    ],
)
def test_errors_are_one_clear_line(options: tuple[str, ...], status: int, message: str) -> None:
    done = compare(*options)
    assert done.exit_code == status
    assert message in done.stderr.splitlines()[-1]


def test_nothing_fits_exits_with_3() -> None:
    done = compare("--memory", "1900MiB", "--arg", "width=1024", "--strategy", "sgd")
    assert done.exit_code == 3
    base, sgd = done.stdout.splitlines()[2:4]
    for line in (base, sgd):  # what each strategy would need, beside a context of 1.8 GiB
        assert re.search(r"none fits +(1\.9|[2-9]\.\d) GiB", line)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_rows_that_ended(number: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "interrupted.py"
    file.write_text(
        "import os, torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if torch.is_autocast_enabled('cuda'):\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "        return super().forward(x)\n"
        "def build():\n"
        "    return Model(8, 8), torch.randn(2, 8)\n"
    )
    done = compare(
        "--gpu", "t4", "--max-batch-size", "8", "--strategy", "sgd", "--strategy", "bf16",
        target=f"{file}:build",
    )  # fmt: skip
    assert done.exit_code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], done.output
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[2:4]] == ["as it is", "sgd"]
    assert "bf16" not in done.stdout
