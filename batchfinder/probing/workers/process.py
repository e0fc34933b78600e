"""One worker process, seen from outside: start, orders, answers, death."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import IO, Any

from batchfinder.errors import WorkerDiedError, WorkerGarbledError
from batchfinder.probing.workers.fork import ASKS_WITHOUT_DRIVER, ForkedProcess
from batchfinder.probing.workers.python_command import python_command
from batchfinder.probing.workers.waiting import never, wait_for

# What a dying process printed last says why; the rest of its output is dropped.
KEPT_OUTPUT_LINES = 100

CLOSING_SECONDS = 10.0

# A process whose orders have ended ends its forks and itself within this time.
FORKS_CLOSING_SECONDS = 2.0

# What a process said before it ended is read within this time.
LAST_ANSWER_SECONDS = 1.0


class WorkerProcess:
    """A process that waits for orders, from the side of its parent.

    Args:
        show_output: whether what it prints is passed on to standard error.
        forked: a fork of this process; None: a new Python process.
    """

    def __init__(self, show_output: bool, forked: ForkedProcess | None = None) -> None:
        # A new process may have forked others, which it ends if it is given the time.
        self._closing_seconds = 0.0 if forked else FORKS_CLOSING_SECONDS
        self._process = forked or subprocess.Popen(
            python_command("batchfinder.probing.workers.child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A session of its own: Ctrl-C is for us alone, and all that it starts can be ended.
            start_new_session=True,
            env={**os.environ, **ASKS_WITHOUT_DRIVER},
        )
        self.pid = self._process.pid
        self._answers: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._output: deque[str] = deque(maxlen=KEPT_OUTPUT_LINES)
        self._garbage: str | None = None
        self._readers = [
            threading.Thread(target=self._read_answers, daemon=True),
            threading.Thread(target=self._read_output, args=(show_output,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._await_end, daemon=True).start()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Our ends of its pipes, which no other process must keep open."""
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        return tuple(pipe.fileno() for pipe in pipes if pipe and not pipe.closed)

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def send(self, order: Mapping[str, Any]) -> None:
        """Send an order. That the process is dead is found on waiting for its answer."""
        pipe = _opened(self._process.stdin)
        with contextlib.suppress(OSError, ValueError):  # ended, or killed by us
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()

    def receive(
        self, timeout_seconds: float | None, is_given_up: Callable[[], bool] = never
    ) -> dict[str, Any]:
        """Wait for an answer.

        Args:
            timeout_seconds: how long; None: for ever.
            is_given_up: asked again and again meanwhile.

        Raises:
            WorkerDiedError: the process ended.
            WorkerGarbledError: something else than an answer came.
            WorkerHungError: it did not answer in time.
            WorkerReleasedError: it was given up.
        """
        answer = wait_for(
            lambda seconds: self._answers.get(timeout=seconds), timeout_seconds, is_given_up
        )
        if answer is None:
            if self._garbage is not None:
                raise WorkerGarbledError(self._garbage)
            # Its own end tells more than the one that we would give it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSING_SECONDS)
            self.kill()
            raise WorkerDiedError(self._process.wait(), "\n".join(self._output))
        return answer

    def kill(self) -> None:
        """End the process and all that it started. Safe to call twice."""
        with contextlib.suppress(OSError):  # an order that it never read
            _opened(self._process.stdin).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._closing_seconds)
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        pipes = (self._process.stdout, self._process.stderr)
        for reader, pipe in zip(self._readers, pipes, strict=True):
            reader.join(CLOSING_SECONDS)
            if not reader.is_alive():  # else something that left the session still holds it
                _opened(pipe).close()

    def _read_answers(self) -> None:
        for line in _opened(self._process.stdout):
            answer = _parsed(line)
            if answer is None:
                # Somebody else has got hold of the pipe: nothing on it counts any more.
                self._garbage = line.decode(errors="replace").strip()
                break
            self._answers.put(answer)
        self._answers.put(None)

    def _await_end(self) -> None:
        self._process.wait()
        # Children that the user's code has started may hold the pipe open for ever.
        self._readers[0].join(LAST_ANSWER_SECONDS)
        self._answers.put(None)

    def _read_output(self, show: bool) -> None:
        for line in _opened(self._process.stderr):
            text = line.decode(errors="replace")
            self._output.append(text.rstrip())
            if show:
                try:
                    sys.stderr.write(text)
                except (OSError, ValueError):  # it is not read any more
                    show = False  # but the worker must not wait for room in its pipe


def _parsed(line: bytes) -> dict[str, Any] | None:
    """An answer; None if it is none."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and "answer" in answer else None


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # all three were asked for
    return pipe
