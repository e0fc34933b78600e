"""What users get wrong: one clear line that says what to do, and nothing half-done."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result
from processes import idle_bytes
from warm import start_command

from batchfinder.cli.app import cli
from batchfinder.cli.exiting import as_typed
from batchfinder.training.user_module import check_target
from batchfinder.units import MIB

pytestmark = pytest.mark.usefixtures("warm_workers")

TARGETS = Path(__file__).parents[1] / "targets"
MODELS = TARGETS / "models.py"
GOOD = f"{MODELS}:build_small"


def find(target: str, *options: str) -> Result:
    return CliRunner().invoke(cli, ["find", target, "--device", "cpu", *options])


def error_of(done: Result) -> str:
    """The one line of the error, once all that must hold for every error has been checked."""
    assert done.stdout == ""
    assert not isinstance(done.exception, Exception) or isinstance(done.exception, SystemExit)
    *before, last = done.stderr.splitlines()
    assert last.startswith("Error: ")
    assert not any(line.startswith("Error: ") for line in before)
    return last.removeprefix("Error: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min-batch-size", "0"), "the minimum batch size must be at least 1, not 0"),
        (("--max-batch-size", "-4"), "the maximum batch size must be at least 1, not -4"),
        (("--multiple-of", "0"), "--multiple-of must be at least 1, not 0"),
        (
            ("--multiple-of", "64", "--max-batch-size", "32"),
            "no multiple of 64 lies between the smallest batch size 1 and the largest 32. "
            "Try another of the three",
        ),
        (("--confirm-steps", "0"), "--confirm-steps must be at least 1, not 0"),
        (
            ("--mode", "eval", "--accumulate"),
            "--accumulate belongs to training, and mode is eval. Try without it.",
        ),
        (("--device", "cpu:9"), "there is no cpu:9 here. Try cpu, which is all of its cores"),
        *(
            (
                (option, seconds),
                f"{name} must be above 0 seconds and at most 1e+09, not {seconds}. Try 600.",
            )
            for option, name in (
                ("--probe-timeout", "--probe-timeout"),
                ("--time-limit", "the time limit"),
            )
            for seconds in ("0", "nan", "inf", "1e+10")
        ),
        (("--global-batch-size", "0"), "--global-batch-size must be at least 1, not 0"),
        (
            ("--noise-scale",),
            "--noise-scale compares gradients of different examples in one process, and only "
            "--loader gives it some. Try --loader FILE.py:FUNCTION, without --strategy.",
        ),
        (
            ("--headroom", "100"),
            "--headroom is a percentage from 0 to below 100, not '100'. Try --headroom 5.",
        ),
        (
            ("--headroom", "some"),
            "--headroom is a percentage from 0 to below 100, not 'some'. Try --headroom 5.",
        ),
        (
            ("--headroom", "0.05"),
            "--headroom is a percentage. Try --headroom 5, or 0.05% if meant.",
        ),
        (
            ("--memory-limit", "much"),
            "'much' is not a memory size. Try 24GiB or 512MiB.",
        ),
        (
            ("--memory-limit", "900000000TiB"),
            "'900000000TiB' is more memory than any device has. Try 24GiB.",
        ),
        (("--memory-limit", "0"), "a memory size must be positive, not '0'. Try 24GiB."),
        (("--arg", "depth"), "--arg 'depth' cannot be read; write it as NAME=VALUE"),
    ],
)
def test_options_that_make_no_sense(options: tuple[str, ...], message: str) -> None:
    done = find(GOOD, *options)
    assert error_of(done) == message
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "options", [("--max-batch-size", "ten"), ("--precision", "fp8"), ("--wrong",)]
)
def test_options_that_cannot_be_read(options: tuple[str, ...]) -> None:
    done = find(GOOD, *options)
    assert error_of(done)
    assert done.exit_code == 2


def test_an_option_of_other_commands_is_refused_with_their_names() -> None:
    done = find(GOOD, "--gpu", "t4")
    assert "It is an option of estimate, check, compare, sweep." in error_of(done)


def test_a_script_without_the_function_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text('open("trained", "w")\n')
    done = find("train.py:build_model")
    assert "train.py has no function build_model. Try" in error_of(done)
    assert "batchfinder run -- python train.py --batch-size {batch_size}" in error_of(done)
    assert done.exit_code == 2
    assert not Path("trained").exists()


def test_a_function_that_the_file_makes_at_run_time_is_looked_for_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = 'for width in (2, 3):\n    globals()[f"build_{width}"] = lambda: None\n'
    Path("made.py").write_text(made)
    check_target("made.py:build_3")


def test_a_loader_whose_process_is_killed(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("import os\n\ndef load():\n    os.kill(os.getpid(), 9)\n")
    # In a process of its own: a pool leaves a process of Python's behind until its parent ends.
    options = (GOOD, "--loader", "data.py:load", "--throughput", "--device", "cpu")
    process = start_command("find", *options, folder=tmp_path)
    (line,) = process.communicate()[1].splitlines()
    assert "was killed, most likely for lack of host memory. Try fewer" in line
    assert process.wait() == 1


BROKEN_DATA = """
import torch

class Data(list):
    def __getitem__(self, place):
        if place >= {place}:
            raise ValueError(f"corrupt record {{place}}")
        return torch.zeros(1 + place % 5, 4)

def padded(examples):
    return torch.nn.utils.rnn.pad_sequence(examples, batch_first=True)

def build_model():
    return torch.nn.Linear(4, 4)

def load():
    data = Data(range(4000))
    return torch.utils.data.DataLoader(data, batch_size=2, collate_fn=padded)
"""


@pytest.mark.parametrize("place", [20, 3000])  # before the search, and in it
def test_a_loader_that_raises_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.py").write_text(BROKEN_DATA.format(place=place))
    done = find("data.py:build_model", "--loader", "data.py:load", "--max-batch-size", "4000")
    assert "(raised while the loader made a batch)" in error_of(done)
    assert "in __getitem__" in done.stderr
    assert done.exit_code == 1


def test_a_script_that_python_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("def build(:\n")
    for name in ("build", "build_model"):
        done = find(f"train.py:{name}")
        assert "SyntaxError: invalid syntax (train.py, line 1)" in error_of(done)
        assert done.exit_code == 1


@pytest.mark.parametrize(
    ("target", "options", "status", "message"),
    [
        ("nowhere.py:build", (), 2, "no such file: nowhere.py. Try its path from"),
        (f"{MODELS}:build_smal", (), 2, "has no function build_smal; did you mean build_small?"),
        (f"{TARGETS}/deaths.py:build", (), 2, "build needs deed; give it by --arg deed=VALUE"),
        (GOOD, ("--arg", "depth=2"), 2, "takes no argument depth; did you mean width?"),
        (f"{MODELS}:build_nothing", (), 1, "returned None; it must return the model"),
        (f"{MODELS}:build_without_sample", (), 1, "there is no example batch: return (model, samp"),
        (f"{MODELS}:build_without_tensors", (), 1, "holds no tensors; give a batch"),
        (f"{MODELS}:build_disagreeing", (), 1, "tensors disagree about the batch size"),
        (GOOD, ("--memory-limit", "100MiB"), 1, "what this process already uses, "),
        (GOOD, ("--memory-limit", "900TiB"), 1, "is above what the device has, "),
        (GOOD, ("--device", "gpu"), 2, "there is no device 'gpu'. Try cpu, cuda"),
        (GOOD, ("--optimizer", "LBFGS"), 2, "LBFGS computes the loss several times a step"),
        (GOOD, ("--input", "foo[3]"), 2, "foo"),
        (GOOD, ("--optimizer", "adamww"), 2, "no optimizer 'adamww' in torch.optim; did you mean"),
    ],
)
def test_what_is_found_on_loading(
    target: str, options: tuple[str, ...], status: int, message: str
) -> None:
    done = find(target, *options)
    assert message in error_of(done)
    assert done.exit_code == status
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_an_answer_to_a_full_disk() -> None:
    command = [sys.executable, "-m", "batchfinder", "gpus"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: the system refused a request (No space left")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_cuda_where_there_is_none() -> None:
    done = find(GOOD, "--device", "cuda")
    assert re.match(r"there is no CUDA device here.* Try .*--device cpu", error_of(done))
    assert done.exit_code == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "build_without_gradient",
            "the loss does not depend on any parameter that requires a gradient: nothing to train; "
            "look for torch.no_grad(), detach() or frozen parameters. "
            "If step trains by itself, try return None; "
            "else return the loss before its backward pass: that and the optimizer step follow",
        ),
        (
            "build_frozen",
            "the model has no parameter that requires a gradient: nothing to train; "
            "call requires_grad_() on what you want to train",
        ),
    ],
)
def test_what_cannot_be_trained(function: str, message: str) -> None:
    done = find(f"{MODELS}:{function}")
    assert error_of(done) == message
    assert done.exit_code == 1
    assert "Traceback" not in done.stderr


def test_a_file_that_does_not_import_shows_its_own_traceback(tmp_path: Path) -> None:
    source = "import json\n\nwidth = json.loads('not json')\ndef build(): ...\n"
    (tmp_path / "train.py").write_text(source)
    done = find(f"{tmp_path}/train.py:build")
    assert error_of(done).startswith("JSONDecodeError: ")
    assert done.exit_code == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{tmp_path}/train.py", line 3, in <module>'
    assert "batchfinder" not in done.stderr


def test_a_file_with_a_syntax_error_shows_the_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def build(:\n")
    done = find(f"{tmp_path}/train.py:build")
    assert error_of(done).startswith("SyntaxError: ")
    assert done.exit_code == 1
    assert f'File "{tmp_path}/train.py", line 1' in done.stderr
    assert "batchfinder" not in done.stderr


def test_a_model_that_fails_at_every_size_shows_its_own_traceback() -> None:
    done = find(f"{TARGETS}/deaths.py:build", "--arg", "deed=raise")
    assert error_of(done) == "ValueError: no such width"
    assert done.exit_code == 1
    assert f'File "{TARGETS}/deaths.py", line' in done.stderr
    assert "probing" not in done.stderr
    assert "tenacity" not in done.stderr


def test_a_model_that_fails_at_some_size_shows_what_had_run() -> None:
    done = find(f"{MODELS}:build_limited", "--max-batch-size", "64")
    assert done.exit_code == 1
    assert done.stdout.startswith("Stopped by an error. Largest size that ran: 1 (not confirmed)")
    assert done.stderr.splitlines()[-1] == "Error: ValueError: only 4 positions were learned"


def test_a_loss_that_is_not_a_number_is_a_warning() -> None:
    done = find(f"{MODELS}:build_nan", "--max-batch-size", "1")
    assert done.exit_code == 0
    assert done.stdout.startswith("Max batch size 1 ")
    (warning,) = (line for line in done.stderr.splitlines() if "nan" in line)
    assert warning.startswith(
        "Warning: the loss is nan on the sample. The measured memory is valid"
    )


def test_a_batch_norm_that_needs_two_examples_starts_at_two() -> None:
    done = find(f"{MODELS}:build_normalized", "--max-batch-size", "3")
    assert done.exit_code == 0
    assert done.stdout.startswith("Max batch size 3 ")
    sizes = re.findall(r"^ +(\d+) ", done.stderr, re.MULTILINE)
    assert sizes[0] == "2"


def test_a_step_that_squeezes_a_batch_of_one_starts_at_two() -> None:
    done = find(f"{MODELS}:build_squeezing", "--max-batch-size", "3")
    assert done.exit_code == 0
    assert done.stdout.startswith("Max batch size 3 ")
    assert (
        "(ValueError: not enough values to unpack (expected 2, got 1)), one of 2 do" in done.stderr
    )
    done = find(f"{MODELS}:build_squeezing", "--max-batch-size", "1")
    assert error_of(done) == (
        "a batch of 1 fails (ValueError: not enough values to unpack (expected 2, got 1)), "
        "one of 2 does not. Try sizes from 2 on"
    )
    assert done.exit_code == 1


def test_a_step_that_takes_groups_of_examples_is_searched_in_groups() -> None:
    done = find(f"{MODELS}:build_grouped", "--max-batch-size", "15")
    assert done.exit_code == 0
    assert done.stdout.startswith("Max batch size 12 ")
    assert (
        "batches of 1 and 9 fail (RuntimeError: shape '[-1, 4, 2]' is invalid for input of size 2),"
        " one of 4 does not: only multiples of 4 were tried" in " ".join(done.stderr.split())
    )
    done = find(f"{MODELS}:build_grouped", "--max-batch-size", "3")
    assert error_of(done).endswith("one of 4 does not. Try multiples of 4")


def test_a_batch_norm_where_only_one_example_is_allowed() -> None:
    done = find(f"{MODELS}:build_normalized", "--max-batch-size", "1")
    assert error_of(done) == (
        "a layer of the model needs more than 1 example to train on. Try batch sizes of 2 or more."
    )
    assert done.exit_code == 1


@pytest.mark.parametrize(
    ("function", "room"), [("build_hungry", 45 * MIB), ("build_hungry_optimizer", 280 * MIB)]
)
def test_nothing_fits_tells_what_is_missing_and_what_could_help(function: str, room: int) -> None:
    limit = str(round((idle_bytes() + room) / 0.95))  # of which 5 % stay free
    done = find(f"{MODELS}:{function}", "--memory-limit", limit)
    assert done.exit_code == 3
    headline, missing, levers = done.stdout.splitlines()
    assert headline.startswith("Nothing fits: batch size 1 needs more than ")
    assert re.match(r"It needs at least \d.* more than the budget. It held .* and", missing)
    assert levers.startswith("Try bf16, an optimizer with less state ")


@pytest.mark.parametrize(
    ("said", "typed"),
    [
        ("on rank 1: confirm_steps must be at least 1", "on rank 1: --confirm-steps must be"),
        ("the ranks do not agree on the option compiled: rank 0", "on the option --compile: rank"),
        ("the ranks do not agree on the mode", "on the mode"),
    ],
)
def test_messages_name_options_as_they_are_typed(said: str, typed: str) -> None:
    with click.Context(cli.commands["find"]):
        assert typed in as_typed(said)
