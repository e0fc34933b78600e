"""The fault matrix: a handful of its faults here, all of them with the slow tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MATRIX = Path(__file__).parents[1] / "scripts" / "faults" / "matrix.py"


def survive(folder: Path, *options: str) -> int:
    """Run the matrix; how many faults were survived, all of them."""
    output = folder / "faults.json"
    command = [sys.executable, str(MATRIX), *options, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["faults"]
    assert all(row["survived"] for row in rows)
    return len(rows)


def test_faults_of_each_kind_are_survived(tmp_path: Path) -> None:
    assert survive(tmp_path, "--short") == 4


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_fault_is_survived(tmp_path: Path) -> None:
    assert survive(tmp_path) > 90
