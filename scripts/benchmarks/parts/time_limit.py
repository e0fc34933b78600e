"""What one of hundreds of foreign models may take, so that a benchmark comes to its end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError, which says how long it was, in what uses the processor longer.

    Again each second, as an exception in a finalizer is not passed on.
    """

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds} CPU seconds")

    signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
