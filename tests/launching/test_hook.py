"""The ways into a Python process of a launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchfinder.launching.launch import HOOK

HOOK_FILE = HOOK / "sitecustomize.py"
PTH = (HOOK / "batchfinder_run.pth").read_text()


@pytest.mark.parametrize("flags", [["-E"], ["-I"], []])
def test_the_hook_enters_once_by_the_pth_file_or_by_the_path(
    flags: list[str], tmp_path: Path
) -> None:
    reports, order = tmp_path / "reports", tmp_path / "order"
    reports.touch()
    order.write_text("{}")
    environment = {
        **os.environ,
        "PYTHONPATH": str(HOOK),
        "BATCHFINDER_RUN": str(order),
        "BATCHFINDER_HOOK": str(HOOK_FILE),
    }
    subprocess.run([sys.executable, *flags, "-c", PTH], env=environment, check=True)
    assert [json.loads(line)["event"] for line in reports.read_text().splitlines()] == ["alive"]


def test_the_hook_imports_nothing_before_pytorch(tmp_path: Path) -> None:
    (tmp_path / "reports").touch()
    (tmp_path / "order").write_text("{}")
    show = [sys.executable, "-I", "-S", "-c", "import sys; exec(sys.argv[1]); print(*sys.modules)"]
    hooked = {"BATCHFINDER_RUN": str(tmp_path / "order"), "BATCHFINDER_HOOK": str(HOOK_FILE)}
    bare, more = (
        {*subprocess.check_output([*show, PTH], env=environment, text=True).split()}
        for environment in ({}, hooked)
    )
    assert more - bare == {"__future__", "_batchfinder_hook"}


def test_without_a_launch_the_pth_file_does_nothing() -> None:
    environment = {name: text for name, text in os.environ.items() if "BATCHFINDER" not in name}
    subprocess.run([sys.executable, "-c", PTH], env=environment, check=True)
