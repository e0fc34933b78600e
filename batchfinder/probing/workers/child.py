"""The worker process: takes the orders of its parent, and says how they ended.

Started by :class:`~batchfinder.probing.workers.process.WorkerProcess` as ``python -m
batchfinder.probing.workers.child``, or forked by
:mod:`~batchfinder.probing.workers.fork_server` or
:mod:`~batchfinder.probing.workers.own_fork`. Orders come as JSON lines on the standard input it
was started with, answers go as JSON lines to the standard output it was started with; what the
user's code prints goes to standard error, and what it reads is empty.
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
from typing import IO, TYPE_CHECKING, Any

from batchfinder.errors import BatchFinderError
from batchfinder.training.user_traceback import user_traceback

if TYPE_CHECKING:
    from batchfinder.training.setup import TrainingSetup


def main(setup: TrainingSetup | None = None) -> None:
    """Serve until the standard input closes.

    Args:
        setup: what to train, if it is in this process already; None: the first order tells.
    """
    orders, answers = _take_standard_streams()
    # Ctrl-C reaches the whole terminal; what then happens is for the parent to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(sys.stderr)

    def answer(what: str, **content: Any) -> None:
        answers.write(json.dumps({"answer": what, **content}) + "\n")
        answers.flush()

    queue: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_receive, args=(orders, queue), daemon=True).start()
    # Not before: that the parent has ended must be noticed in the seconds that PyTorch takes too.
    from batchfinder.probing.workers.duty import WorkerDuty

    with contextlib.ExitStack() as opened:
        order = queue.get()
        if setup is not None:
            order["setup"] = setup
        duty = _or_tell(answer, lambda: WorkerDuty(order, opened, answer))
        while True:
            order = queue.get()
            attempt = _or_tell(answer, lambda: duty.run(order))  # noqa: B023 - called at once
            answer(
                "probe",
                probe=attempt.probe.to_dict(),
                was_clean=attempt.was_clean,
                is_reusable=attempt.is_reusable,
                warnings=duty.warnings,
            )


def _or_tell(answer: Callable[..., None], action: Callable[[], Any]) -> Any:
    """Do something of which every failure is to be told to the parent, which then ends us."""
    try:
        return action()
    except BatchFinderError as error:
        answer("error", kind=type(error).__name__, message=str(error))
    except SystemExit as error:
        message = f"the code called sys.exit({error.code!r}); take that out of the training step"
        answer("user_error", message=message, traceback="")
    except BaseException as error:  # noqa: BLE001 - told, with all of it, before the end
        message = "".join(f"{type(error).__name__}: {error}".splitlines()[:1])
        answer("user_error", message=message, traceback=user_traceback(error))
    os._exit(1)


def _take_standard_streams() -> tuple[IO[bytes], IO[str]]:
    """Keep the pipes to the parent for ourselves, whatever the user's code prints or reads."""
    orders = os.fdopen(os.dup(0), "rb")
    answers = io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return orders, answers


def _receive(orders: IO[bytes], queue: SimpleQueue[dict[str, Any]]) -> None:
    """Hand on each order; without a parent there is nothing left to do."""
    with contextlib.suppress(OSError):
        for line in orders:
            order = json.loads(line)
            if "pickled_bytes" in order:
                order["pickled_setup"] = orders.read(order["pickled_bytes"])
            queue.put(order)
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with all that the user's code has started
    os._exit(1)
