"""Signals that end a search."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from batchfinder.cli.exiting import CTRL_C, TERMINATED, TIME_IS_UP


@contextmanager
def terminated_as_ctrl_c(seconds: float | None = None) -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP end the search like Ctrl-C. Restore the handlers.

    Schedulers send SIGTERM, a closed terminal SIGHUP. Under nohup, SIGHUP stays ignored. A time
    limit in seconds ends the search in the same way. Yields a list whose last item is the exit
    status for a KeyboardInterrupt.
    """
    exit_status = [CTRL_C]
    causes = {signal.SIGTERM: TERMINATED}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        causes[signal.SIGHUP] = TERMINATED
    if hasattr(signal, "setitimer"):
        causes[signal.SIGALRM] = TIME_IS_UP

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        exit_status.append(causes[signal.Signals(signal_number)])
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *causes)}
    for number in causes:
        signal.signal(number, interrupt)
    try:
        if seconds is not None:
            _set_alarm(max(seconds, 0.001))
        yield exit_status
    finally:
        _set_alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _set_alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
