"""Commands run as a user of this checkout would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def run_python(*arguments: str) -> str:
    """What Python prints, run in the repository's folder; it must end well."""
    # Before what is there already: this machine may keep packages in a folder of their own.
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, [str(REPOSITORY), str(REPOSITORY / "tests"), *before]))
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
