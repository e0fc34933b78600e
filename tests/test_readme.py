"""The README: its commands and its Python run as printed, and its lists leave nothing out."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fakes import FakeProber
from marks import needs_fully_shard
from processes import REPOSITORY, idle_bytes, run_python
from warm import run_warm

from batchfinder import BatchSizeResult, Probe
from batchfinder.cli.app import cli
from batchfinder.search.run import run_search
from batchfinder.units import MIB

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)

SCRIPTS = sorted(
    str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("scripts/*/README.md")
)

# Installs, this very suite, and searches of a minute: run_tests.sh and a fresh clone show them.
SET_UP = ("scripts/run_demo.sh", "scripts/run_tests.sh", "pip")

# What a machine without a GPU, with a few GiB and two cores, has instead.
SMALLER = {"24GiB": "2GiB", "--nproc-per-node 8": "--nproc-per-node 2"}

# The user's file, whose name the commands take for granted.
TRAIN = """
import torch
from torch import nn


def build_model(seq_len=64):
    layers = [nn.Linear(64, 64) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(4, seq_len, 64)
"""

# What the Python blocks take for granted.
PREAMBLE = """
import torch
from torch import nn


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, inputs):
        return self.linear(inputs)


my_loss = nn.functional.cross_entropy
images, labels = torch.randn(4, 64), torch.randint(10, (4,))
"""
EPILOGUE = """
from batchfinder import find_max_batch
if "build_setup" in globals():
    assert find_max_batch(build_setup(), device="cpu", max_batch_size=8).batch_size == 8
else:
    assert 1 <= result.batch_size < 64
"""


def console_lines() -> list[tuple[str, str]]:
    """Each command without its comment, and what is printed below it."""
    found = []
    for kind, text in BLOCKS:
        if kind == "console":
            for part in text.replace("\\\n", " ").removeprefix("$ ").split("\n$ "):
                command, _, printed = part.partition("\n")
                found.append((command.partition(" #")[0].strip(), printed))
    return found


COMMANDS = console_lines()


def named(start: str) -> list[str]:
    return [command for command, _ in COMMANDS if command.startswith(start)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, with a file to train."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "scripts").symlink_to(REPOSITORY / "scripts")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run_command(words: list[str]) -> Result:
    """Run ``batchfinder`` in this process; it must end well."""
    done = CliRunner().invoke(cli, words[1:])
    assert done.exit_code == 0, done.output
    return done


def on_this_machine(command: str) -> list[str]:
    """The words of a command, with what this machine has instead of a user's."""
    for theirs, ours in SMALLER.items():
        command = command.replace(theirs, ours)
    words = shlex.split(command.partition(" > ")[0])
    if "--max-batch-size" not in words:
        words += ["--max-batch-size", "16"]
    return [*words, "--device", "cpu"]


def test_every_command_is_of_a_known_kind() -> None:
    assert len(COMMANDS) >= 10
    ours = ("find", "estimate", "run", "check", "compare", "sweep", "watch")
    known = (*(f"batchfinder {command} " for command in ours), "torchrun", *SET_UP)
    assert [command for command, _ in COMMANDS if not command.startswith(known)] == []


def test_the_scripts_can_be_run() -> None:
    scripts = set(re.findall(r"scripts/[\w/]+\.(?:sh|py)", README))
    assert len(scripts) >= 4
    assert [name for name in scripts if not (REPOSITORY / name).is_file()] == []
    shells = [name for name in scripts if name.endswith(".sh")]
    assert [name for name in shells if not os.access(REPOSITORY / name, os.X_OK)] == []


def test_the_demo_searches_for_what_the_readme_says() -> None:
    demo = (REPOSITORY / "scripts" / "run_demo.sh").read_text()
    (target, options) = re.findall(r"\$ batchfinder find (scripts\S+) (.+)", README)[0]
    assert target in demo
    assert options in demo


@pytest.mark.parametrize("command", named("batchfinder find"))
@pytest.mark.usefixtures("folder", "warm_workers")
def test_searches(command: str) -> None:
    printed = run_command(on_this_machine(command)).stdout
    if " > " in command:
        assert json.loads(printed)["status"] == "capped"
    else:
        assert "Max batch size" in printed


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (command, expected)
        for start, expected in (
            ("batchfinder check", "trains on cpu"),
            ("batchfinder compare", "bf16 + checkpointing"),
            ("batchfinder watch", "Peak: "),
        )
        for command in named(start)
    ],
)
@pytest.mark.usefixtures("folder", "warm_workers")
def test_other_commands(command: str, expected: str) -> None:
    words = shlex.split(command.replace("python", sys.executable))
    words += ["--device", "cpu", "--memory-limit", "2GiB"] if "check" in command else []
    assert expected in run_command(words).output


@pytest.mark.slow
@pytest.mark.parametrize("command", named("batchfinder sweep"))
@pytest.mark.usefixtures("folder", "warm_workers")
def test_sweeps(command: str) -> None:
    words = [*on_this_machine(command), "--memory-limit", "1GiB"]
    assert "max_tokens" in run_command(words).stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", named("torchrun"))
def test_searches_on_ranks(command: str, folder: Path) -> None:
    _, *options = on_this_machine(command)
    printed = run_python("-m", "torch.distributed.run", *options, folder=folder)
    assert "Max batch size" in printed


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param(*line, marks=[needs_fully_shard] if "fsdp" in line[0] else [])
        for line in COMMANDS
        if line[0].startswith("batchfinder est")
    ],
)
@pytest.mark.filterwarnings("ignore")  # as in a process of its own
@pytest.mark.usefixtures("folder")
def test_estimates(command: str, expected: str) -> None:
    printed = run_command(shlex.split(command)).stdout
    assert "max batch" in printed
    # A called function's arguments live a little longer in Python 3.10, so a step peaks elsewhere.
    if expected and sys.version_info >= (3, 11):
        assert printed.split() == expected.split()


@pytest.mark.parametrize("code", [text for kind, text in BLOCKS if kind == "python"])
def test_python_blocks(code: str, folder: Path) -> None:
    code = code.replace('"2GiB"', f"{idle_bytes() + 200 * MIB}")
    run_warm(PREAMBLE + code + EPILOGUE, folder=folder)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("document", ["README.md", "batchfinder/README.md", *SCRIPTS])
def test_links_lead_somewhere(document: str) -> None:
    path = REPOSITORY / document
    links = re.findall(r"\]\((?!http)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_tables_are_those_of_the_results() -> None:
    command = [sys.executable, "scripts/results/tables.py", "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", [BatchSizeResult, Probe])
def test_the_json_is_documented_name_by_name(kind: type) -> None:
    result = run_search(FakeProber())
    shown = result if kind is BatchSizeResult else result.probes[0]
    described = set(
        re.findall(r"^        ([a-z_]+(?:, [a-z_]+)*):", str(kind.__doc__), re.MULTILINE)
    )
    names = {name for group in described for name in group.split(", ")}
    properties = {name for name, value in vars(kind).items() if isinstance(value, property)}
    assert set(shown.to_dict()) - {"schema_version"} <= names | properties
