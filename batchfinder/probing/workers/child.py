"""The worker process: carry out the orders of its parent, and answer them.

:class:`~batchfinder.probing.workers.process.WorkerProcess` starts it as ``python -m
batchfinder.probing.workers.child``, or :class:`~batchfinder.probing.workers.fork.ForkedProcess`
forks it. Orders come as JSON lines on its original standard input. Answers go as JSON lines to its
original standard output. Output of the user's code goes to standard error, and its standard input
is empty.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from batchfinder.errors import BatchFinderError, UserCodeError
from batchfinder.probing.attempt import error_to_dict
from batchfinder.probing.devices.collector import collector_off
from batchfinder.training.user_traceback import error_line, user_traceback

if TYPE_CHECKING:
    from batchfinder.training.setup import TrainingSetup


class Line:
    """The connection to the parent. The user's code cannot print to it or read from it.

    Attributes:
        orders: the orders received so far and not yet taken.
        forks: ids of the processes that were forked here. They end with this process.
    """

    def __init__(self) -> None:
        self._orders = os.fdopen(os.dup(0), "rb")
        self._answers = io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), encoding="utf-8")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self.orders: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.forks: set[int] = set()
        self._is_free = threading.Lock()
        self._answered = 0
        threading.Thread(target=self._receive, daemon=True).start()

    @property
    def descriptors(self) -> tuple[int, int]:
        """The file descriptors of both pipes. Forks must close them."""
        return self._orders.fileno(), self._answers.fileno()

    def next_order(self) -> dict[str, Any]:
        """Wait for the next order and return it."""
        order = self.orders.get()
        self._answered = order["id"]
        return order

    def answer(self, what: str, **content: Any) -> None:
        """Answer the last order."""
        self.pass_on({"answer": what, "to": self._answered, **content})

    def pass_on(self, answer: dict[str, Any]) -> None:
        """Send an answer unchanged. Any thread may call this."""
        with self._is_free:
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()

    def or_tell(self, action: Callable[[], Any]) -> Any:
        """Run an action. If it fails, report the error to the parent and end this process."""
        try:
            return action()
        except BatchFinderError as error:
            failure = error
        except SystemExit as error:
            told = f"the code called sys.exit({error.code!r})"
            failure = UserCodeError(f"{told}. Try taking that out of the training step")
        except BaseException as error:  # noqa: BLE001 - reported with its traceback before the end
            failure = UserCodeError(error_line(error), user_traceback(error))
        self.answer("error", **error_to_dict(failure))
        os._exit(1)

    def _receive(self) -> None:
        """Queue each order. Once the parent has ended, end this process."""
        with contextlib.suppress(OSError, ValueError):  # the parent was killed within an order
            for line in self._orders:
                self.orders.put(json.loads(line))
        # End all processes that the user's code has started too. Wait for forks, because a
        # container may have no other process that reaps them.
        for fork in tuple(self.forks):
            with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
                os.killpg(fork, signal.SIGKILL)
                os.waitpid(fork, 0)
        if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def main() -> None:
    """Serve in a new process until the orders end."""
    line = _line()
    order = line.next_order()
    # Imported only now, because it takes seconds to import PyTorch. The line already notices if the
    # parent ends meanwhile.
    with collector_off():
        import batchfinder.training.loading  # noqa: F401 - for it
        from batchfinder.probing.workers.fork_server import serve_in_forks

    serve_in_forks(line, order)


def serve_fork(setup: TrainingSetup | None) -> None:
    """Serve in a fork until the orders end. Without a setup, each order names its source."""
    line = _line()
    order = line.next_order()
    from batchfinder.probing.workers.serving import serve

    serve(line, order, setup)


def _line() -> Line:
    line = Line()
    # Ctrl-C reaches all processes of the terminal. The parent decides how to react.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(sys.stderr)
    return line
