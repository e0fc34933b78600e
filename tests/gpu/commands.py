"""Commands run as a user of this checkout would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_python(*arguments: str) -> str:
    """What Python prints, run in the repository's folder; it must end well."""
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
