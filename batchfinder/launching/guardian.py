"""Supervise one launch: start a command and end all of its processes. Imports no batchfinder.

Run as ``python -I -S guardian.py EXIT_FILE COMMAND ...``. Orphans of the command become children of
this process (PR_SET_CHILD_SUBREAPER), so all are found, even those in sessions of their own. The
command is ended when standard input closes: its driver has closed it, or has died.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LOOK_SECONDS = 0.02  # between two looks at the command

# How long to wait for processes to end, in seconds. A device driver may hold one in the kernel.
ENDING_SECONDS = 30.0

PROC = Path("/proc")
SHARED = Path("/dev/shm")

NOT_STARTED = 127  # the exit status of shells for a command that cannot be started


def keep(exit_file: str, command: list[str]) -> None:
    """Run a command until it ends or standard input closes; write its exit status to a file."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    driver = os.getppid()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_restore_signals)
    except OSError as error:
        Path(exit_file).write_text(f"{NOT_STARTED} {error.strerror}")
        return
    while child.poll() is None:
        if select.select([0], [], [], LOOK_SECONDS)[0] and not os.read(0, 1):
            break
    status = child.poll()
    end_descendants()
    if status is None or os.getppid() != driver:
        # The driver has died, or is interrupted while it waits: it may not remove its folder.
        shutil.rmtree(Path(exit_file).parent, ignore_errors=True)
    else:
        Path(exit_file).write_text(str(status))


def _restore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def end_descendants() -> None:
    """End all descendants. Stop each first, so that none reacts to the end of another.

    A loader's worker that ends while it makes a batch leaves it in shared memory, which is removed.
    """
    deadline = time.monotonic() + ENDING_SECONDS
    ended: set[str] = set()
    while time.monotonic() < deadline:
        stopped: set[int] = set()
        while new := descendants(os.getpid()) - stopped:
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            _signal(pid, signal.SIGKILL)
        ended |= set(map(str, stopped))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        time.sleep(LOOK_SECONDS / 4)
    for file in SHARED.glob("torch_*_*"):  # torch_PID_...
        if file.name.split("_")[1] in ended:
            with contextlib.suppress(OSError):
                file.unlink()


def descendants(ancestor: int) -> set[int]:
    """Return all descendants of a process: its children, their children, and so on."""
    stats = {int(folder.name): stat_of(folder.name) for folder in PROC.glob("[0-9]*")}
    parents = {pid: int(stat[1]) for pid, stat in stats.items() if stat}
    found = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {ancestor}


def stat_of(pid: int | str) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; none if the process has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    keep(sys.argv[1], sys.argv[2:])
