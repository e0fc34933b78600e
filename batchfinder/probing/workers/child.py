"""The worker process: takes the orders of its parent, and says how they ended.

Started by :class:`~batchfinder.probing.workers.process.WorkerProcess` as ``python -m
batchfinder.probing.workers.child``, or forked by
:class:`~batchfinder.probing.workers.fork.ForkedProcess`. Orders come as JSON lines on the standard
input it was started with, answers go as JSON lines to the standard output it was started with; what
the user's code prints goes to standard error, and what it reads is empty.
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

from batchfinder.errors import BatchFinderError
from batchfinder.probing.attempt import error_to_dict
from batchfinder.training.user_traceback import user_traceback

if TYPE_CHECKING:
    from batchfinder.training.setup import TrainingSetup


class Line:
    """The line to the parent, kept for ourselves whatever the user's code prints or reads.

    Attributes:
        orders: the orders that have come.
        forks: the processes that were forked here, which end with this one.
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
        """The ends of both pipes, which no fork must keep."""
        return self._orders.fileno(), self._answers.fileno()

    def next_order(self) -> dict[str, Any]:
        """Wait for an order."""
        order = self.orders.get()
        self._answered = order["id"]
        return order

    def answer(self, what: str, **content: Any) -> None:
        """Answer the last order."""
        self.pass_on({"answer": what, "to": self._answered, **content})

    def pass_on(self, answer: dict[str, Any]) -> None:
        """Send an answer as it is. Any thread may do so."""
        with self._is_free:
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()

    def or_tell(self, action: Callable[[], Any]) -> Any:
        """Do something; tell the parent of a failure, and end."""
        try:
            return action()
        except BatchFinderError as error:
            told = error_to_dict(error)
        except SystemExit as error:
            message = (
                f"the code called sys.exit({error.code!r}); take that out of the training step"
            )
            told = {"kind": "UserCodeError", "message": message, "traceback": ""}
        except BaseException as error:  # noqa: BLE001 - told, with all of it, before the end
            message = "".join(f"{type(error).__name__}: {error}".splitlines()[:1])
            told = {
                "kind": "UserCodeError",
                "message": message,
                "traceback": user_traceback(error),
            }
        self.answer("error", **told)
        os._exit(1)

    def _receive(self) -> None:
        """Hand on each order; without a parent there is nothing left to do."""
        with contextlib.suppress(OSError):
            for line in self._orders:
                self.orders.put(json.loads(line))
        # With all that the user's code has started. Forks are waited for: in a
        # container there may be no other process that does so.
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
    # Not before: that the parent has ended must be noticed in the seconds that PyTorch takes too.
    from batchfinder.probing.workers.host import host

    host(line, order)


def serve_fork(setup: TrainingSetup | None) -> None:
    """Serve in a fork until the orders end.

    Args:
        setup: what to train; None: each order names its source.
    """
    line = _line()
    order = line.next_order()
    from batchfinder.probing.workers.serving import serve

    serve(line, order, setup)


def _line() -> Line:
    line = Line()
    # Ctrl-C reaches the whole terminal; what then happens is for the parent to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(sys.stderr)
    return line
