"""The fork server and the processes that it forks, seen from outside. Linux only."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from queue import Empty
from typing import IO

from batchfinder.probing.workers.python_command import python_command
from batchfinder.probing.workers.waiting import wait_for

# How long a server may take to end by itself.
CLOSING_SECONDS = 1.0

# The first number of a descriptor that is no standard stream.
ABOVE_STANDARD = 3


class ForkServer:
    """Imports PyTorch once, and forks a process whenever one is asked for.

    See :mod:`~batchfinder.probing.workers.fork_server`.
    """

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                python_command("batchfinder.probing.workers.fork_server"),
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
        with WorkerPipes() as pipes, contextlib.ExitStack() as opened:
            read, tells = os.pipe()
            told = opened.enter_context(os.fdopen(read, "rb"))
            with contextlib.suppress(OSError):
                socket.send_fds(self._control, [b"!"], [*pipes.theirs, tells])
            os.close(tells)
            pipes.close_theirs()
            look = functools.partial(_first_line, told)
            if pid := wait_for(look, timeout_seconds, is_given_up):
                opened.pop_all()
                self._has_forked = True
                return pipes.process(int(pid), functools.partial(_told_status, told))
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


def _told_status(told: IO[bytes]) -> int:
    with told:
        status = told.readline()
    # Nothing is told where the one that watches it was killed: whoever did it meant both.
    return int(status) if status else -signal.SIGKILL


class WorkerPipes:
    """Both ends of the pipes that are to be a worker's standard streams; leaving it closes them.

    Attributes:
        theirs: the worker's ends: its standard input, output and error.
    """

    def __init__(self) -> None:
        pipes = [os.pipe() for _ in range(3)]
        orders, answers, output = pipes
        self.theirs: tuple[int, ...] = (orders[0], answers[1], output[1])
        self._ours: tuple[IO[bytes], ...] = (
            os.fdopen(orders[1], "wb"),
            os.fdopen(answers[0], "rb"),
            os.fdopen(output[0], "rb"),
        )

    def __enter__(self) -> WorkerPipes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_theirs()
        self._close_ours()

    def close_theirs(self) -> None:
        """Close the worker's ends, once it has them. Safe to call twice."""
        for end in self.theirs:
            os.close(end)
        self.theirs = ()

    def process(self, pid: int, await_status: Callable[[], int]) -> ForkedProcess:
        """The process that has the other ends; to it go ours.

        Args:
            pid: its process id.
            await_status: waits until it has ended, and returns its exit status.
        """
        ours, self._ours = self._ours, ()
        return ForkedProcess(pid, await_status, *ours)

    def take_as_standard_streams(self) -> None:
        """In the process that is to be the worker."""
        import fcntl  # not on Windows

        # Where a standard stream was closed, an end of ours or theirs may have got its number.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, ABOVE_STANDARD) for end in self.theirs]
        self.__exit__()
        for standard, end in enumerate(ends):
            os.dup2(end, standard)
            os.close(end)

    def _close_ours(self) -> None:
        for end in self._ours:
            end.close()
        self._ours = ()


class ForkedProcess:
    """A forked process, with as much of :class:`subprocess.Popen` as a worker needs.

    Args:
        pid: its process id.
        await_status: waits until it has ended, and returns its exit status.
        stdin: its standard input,
        stdout: output
        stderr: and standard error.
    """

    def __init__(
        self,
        pid: int,
        await_status: Callable[[], int],
        stdin: IO[bytes],
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        self.pid, self.stdin, self.stdout, self.stderr = pid, stdin, stdout, stderr
        self._await_status = await_status
        self._status = 0
        self._has_ended = threading.Event()
        threading.Thread(target=self._await_end, daemon=True).start()

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

    def _await_end(self) -> None:
        self._status = self._await_status()
        self._has_ended.set()
