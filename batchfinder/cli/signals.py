"""Signals that end a search."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CTRL_C = 130
TERMINATED = 143


@contextmanager
def terminated_as_ctrl_c() -> Iterator[list[int]]:
    """Let SIGTERM, as a scheduler sends it, end the search as Ctrl-C does; puts both back.

    Yields:
        A list whose last item is the exit status for a KeyboardInterrupt.
    """
    exit_status = [CTRL_C]

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        exit_status.append(TERMINATED)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield exit_status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
