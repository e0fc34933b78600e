"""The fork server and the processes that it forks, seen from outside. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import IO


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

    def fork(self) -> ForkedProcess | None:
        """A new process, as soon as all is imported; None if the server has died."""
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
            if pid := told.readline():
                ours.pop_all()
                return ForkedProcess(int(pid), told, stdin, stdout, stderr)
        return None

    def close(self) -> None:
        """End the server; what it has forked lives on. Safe to call twice."""
        self._control.close()
        self._process.kill()
        self._process.wait()


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
        # Nothing is told where the one that watches it was killed: then so was it.
        self._status = int(status) if status else -signal.SIGKILL
        self._has_ended.set()
