"""The process that ends a launch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from processes import eventually

from batchfinder.launching.launch import GUARDIAN


def test_it_removes_the_folder_of_a_launch_that_the_driver_ends(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", str(GUARDIAN), str(folder / "exit"), *command],
        stdin=subprocess.PIPE,
    )
    assert guardian.stdin is not None
    guardian.stdin.close()
    assert guardian.wait(timeout=30) == 0
    assert not folder.exists()


def test_it_writes_the_exit_status_of_a_command_that_ends_by_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    arguments = [sys.executable, "-I", "-S", str(GUARDIAN), str(tmp_path / "exit"), *command]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as guardian:
        assert guardian.wait(timeout=30) == 0
    assert (tmp_path / "exit").read_text() == "3"


def test_it_removes_what_a_worker_that_it_ends_leaves_in_shared_memory(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, time\n"
        "file = pathlib.Path(f'/dev/shm/torch_{os.getpid()}_1_0')\n"
        "file.write_text('batch')\n"
        f"pathlib.Path({str(tmp_path / 'made')!r}).symlink_to(file)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code]
    arguments = [sys.executable, "-I", "-S", str(GUARDIAN), str(tmp_path / "launch/exit"), *command]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as guardian:
        assert eventually(lambda: (tmp_path / "made").is_symlink())
        assert (tmp_path / "made").exists()
        assert guardian.stdin is not None
        guardian.stdin.close()
        assert guardian.wait(timeout=30) == 0
    assert not (tmp_path / "made").readlink().exists()
