"""Control one worker process from its parent: start, orders, answers, death."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from batchfinder.errors import (
    WorkerDiedError,
    WorkerGarbledError,
    WorkerHungError,
    WorkerReleasedError,
)
from batchfinder.probing.workers.fork import ASKS_WITHOUT_DRIVER, ForkedProcess

# The last lines that a dying process printed say why it died. Earlier output is dropped.
KEPT_OUTPUT_LINES = 100

# Arrow's own memory pool, of data sets, reserves 1 GiB, which counts toward the CPU's limit.
NO_RESERVES = {"ARROW_DEFAULT_MEMORY_POOL": "system"}

# Time limit for a process that closed its output to end, and for its last output to be read.
CLOSING_SECONDS = 10.0

# Time for a process to end its forks and itself after its orders have ended.
FORKS_CLOSING_SECONDS = 2.0

# Time to read the last answers of a process after it has ended.
LAST_ANSWER_SECONDS = 1.0

# Time between two checks whether to give up a wait.
GIVEN_UP_EVERY_SECONDS = 0.1

# Unlike ``python -m``, this works from any folder, even if batchfinder is not installed, and files
# in the current folder do not shadow modules of the same name.
_FOLDER = str(Path(__file__).parents[3])
_CHILD = f"""import sys
sys.path[:1] == [''] and sys.path.pop(0)
{_FOLDER!r} in sys.path or sys.path.append({_FOLDER!r})
from batchfinder.probing.workers.child import main
main()"""


def never() -> bool:
    """Return False: never give up."""
    return False


class WorkerProcess:
    """A process that waits for orders, as its parent sees it.

    Args:
        show_output: pass its output on to standard error.
        forked: a fork of this process; None to start a new Python process.
    """

    def __init__(self, show_output: bool, forked: ForkedProcess | None = None) -> None:
        # A new process may have forked others. It needs a moment to end them.
        self._closing_seconds = 0.0 if forked else FORKS_CLOSING_SECONDS
        self._process = forked or start_python([sys.executable, "-c", _CHILD])
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
        """The file descriptors of our ends of its pipes. Other processes must close them."""
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        return tuple(pipe.fileno() for pipe in pipes if pipe and not pipe.closed)

    def is_alive(self) -> bool:
        """Return True if the process has not ended yet."""
        return self._process.poll() is None

    def send(self, order: Mapping[str, Any]) -> None:
        """Send an order. If the process is dead, waiting for its answer raises the error."""
        pipe = _opened(self._process.stdin)
        with contextlib.suppress(OSError, ValueError):  # it has ended, or we killed it
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()

    def receive(
        self, timeout_seconds: float = math.inf, is_given_up: Callable[[], bool] = never
    ) -> dict[str, Any]:
        """Wait for an answer; ``is_given_up`` is called repeatedly, and True ends the wait.

        Raises:
            WorkerDiedError: the process ended.
            WorkerGarbledError: the process sent something other than an answer.
            WorkerHungError: the process did not answer in time.
            WorkerReleasedError: ``is_given_up`` returned True.
        """
        answer = self._next_answer(timeout_seconds, is_given_up)
        if answer is None:
            if self._garbage is not None:
                raise WorkerGarbledError(self._garbage)
            # Let it end by itself, because its own exit status says more than a kill.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSING_SECONDS)
            self.kill()
            raise WorkerDiedError(self._process.wait(), "\n".join(self._output))
        return answer

    def _next_answer(
        self, timeout_seconds: float, is_given_up: Callable[[], bool]
    ) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = deadline - time.monotonic()
            try:
                return self._answers.get(timeout=min(max(left, 0), GIVEN_UP_EVERY_SECONDS))
            except Empty:
                if left <= 0:
                    raise WorkerHungError(timeout_seconds) from None
                if is_given_up():
                    raise WorkerReleasedError from None

    def kill(self) -> None:
        """End the process and all that it started. Safe to call twice."""
        with contextlib.suppress(OSError):  # the process never read an order
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
            if not reader.is_alive():  # else a process that left the session still holds the pipe
                _opened(pipe).close()

    def _read_answers(self) -> None:
        for line in _opened(self._process.stdout):
            answer = _parsed(line)
            if answer is None:
                # Other code writes to the pipe, so nothing on it can be trusted any more.
                self._garbage = line.decode(errors="replace").strip()
                break
            self._answers.put(answer)
        self._answers.put(None)

    def _await_end(self) -> None:
        self._process.wait()
        # Child processes of the user's code may keep the pipe open forever.
        self._readers[0].join(LAST_ANSWER_SECONDS)
        self._answers.put(None)

    def _read_output(self, show: bool) -> None:
        for line in _opened(self._process.stderr):
            text = line.decode(errors="replace")
            self._output.append(text.rstrip())
            if show:
                try:
                    sys.stderr.write(text)
                except (OSError, ValueError):  # our standard error is closed
                    show = False  # keep reading, or the worker would block on a full pipe


def start_python(command: list[str]) -> subprocess.Popen[bytes]:
    """Start the process of a worker, in a new session, with pipes to all its standard streams.

    Ctrl-C reaches only this process, and all processes in the session can be ended together.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**NO_RESERVES, **os.environ, **ASKS_WITHOUT_DRIVER},
    )


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the answer in a line; None if the line is not an answer."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and "answer" in answer else None


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # Popen was asked for all three pipes
    return pipe
