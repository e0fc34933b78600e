"""The fork server and the processes that it forks, seen from outside. Linux only."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from queue import Empty
from typing import IO

from batchfinder.probing.waiting import wait_for

# How long a server may take to end by itself.
CLOSING_SECONDS = 1.0


class ForkServer:
    """Imports PyTorch once, and forks a process whenever one is asked for.

    See :mod:`~batchfinder.probing.fork_server`.
    """

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "batchfinder.probing.fork_server"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._has_forked = False

    def fork(self, timeout_seconds: float, is_given_up: Callable[[], bool]) -> ForkedProcess | None:
        """A new process, as soon as all is imported; None if the server has died.

        Args:
            timeout_seconds: how long that may take.
            is_given_up: asked again and again meanwhile.

        Raises:
            WorkerHungError: it took longer.
            WorkerReleasedError: it was given up.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:

            def pipe(we_write: bool) -> tuple[int, IO[bytes]]:
                read, write = os.pipe()
                their_end, our_end = (read, write) if we_write else (write, read)
                theirs.callback(os.close, their_end)
                return their_end, ours.enter_context(os.fdopen(our_end, "wb" if we_write else "rb"))

            orders, stdin = pipe(we_write=True)
            answers, stdout = pipe(we_write=False)
            output, stderr = pipe(we_write=False)
            tells, told = pipe(we_write=False)
            with contextlib.suppress(OSError):
                socket.send_fds(self._control, [b"!"], [orders, answers, output, tells])
            theirs.close()
            look = functools.partial(_first_line, told)
            if pid := wait_for(look, timeout_seconds, is_given_up):
                ours.pop_all()
                self._has_forked = True
                return ForkedProcess(int(pid), told, stdin, stdout, stderr)
        return None

    def close(self) -> None:
        """End the server; what it has forked lives on. Safe to call twice."""
        self._control.close()
        if self._has_forked:  # then it first waits for the ends of those that watched
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSING_SECONDS)
        self._process.kill()
        self._process.wait()


def _first_line(told: IO[bytes], seconds: float) -> bytes:
    if not select.select([told], [], [], seconds)[0]:
        raise Empty
    return told.readline()


class ForkedProcess:
    """A forked process, with as much of :class:`subprocess.Popen` as a worker needs.

    Args:
        pid: its process id.
        told: yields its exit status once it has ended.
        stdin: its standard input,
        stdout: output
        stderr: and standard error.
    """

    def __init__(
        self, pid: int, told: IO[bytes], stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]
    ) -> None:
        self.pid, self.stdin, self.stdout, self.stderr = pid, stdin, stdout, stderr
        self._status = 0
        self._has_ended = threading.Event()
        threading.Thread(target=self._await_status, args=(told,), daemon=True).start()

    def poll(self) -> int | None:
        """The exit status; None until it has ended."""
        return self._status if self._has_ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; its exit status.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self._status

    def kill(self) -> None:
        """End it, unless it has ended."""
        if not self._has_ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _await_status(self, told: IO[bytes]) -> None:
        with told:
            status = told.readline()
        # Nothing is told where the one that watches it was killed: whoever did it meant both.
        self._status = int(status) if status else -signal.SIGKILL
        self._has_ended.set()
