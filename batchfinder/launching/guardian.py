"""Keep a launch: start the command, and end every process of it. Needs no batchfinder.

Run as ``python -I -S guardian.py EXIT_FILE COMMAND ...``. Orphans of the command become children of
this process (PR_SET_CHILD_SUBREAPER), so none is lost, whatever sessions it opens. The command ends
when standard input does: then its driver wants no more, or has died.
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

PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 0.02

# A process that a driver holds in the kernel may take so long to end.
ENDING_SECONDS = 30.0

NOT_STARTED = 127


def keep(exit_file: str, command: list[str]) -> None:
    """Run a command to its end or that of standard input; write its exit status to a file."""
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
    if os.getppid() != driver:  # it has died, and cannot tidy up
        shutil.rmtree(Path(exit_file).parent, ignore_errors=True)
    elif status is not None:
        Path(exit_file).write_text(str(status))


def _restore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def end_descendants() -> None:
    """End all of them; first each is stopped, so that none acts on the end of another."""
    deadline = time.monotonic() + ENDING_SECONDS
    while time.monotonic() < deadline:
        stopped: set[int] = set()
        while new := descendants(os.getpid()) - stopped:
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            _signal(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(LOOK_SECONDS / 4)


def descendants(ancestor: int) -> set[int]:
    """The processes that another one has started, those that they have, and so on."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {ancestor}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {ancestor}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    keep(sys.argv[1], sys.argv[2:])
