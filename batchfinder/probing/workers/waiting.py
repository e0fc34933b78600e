"""Waiting for another process: not for ever, and only as long as somebody wants to. No torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from queue import Empty
from typing import TypeVar

from batchfinder.errors import WorkerHungError, WorkerReleasedError

# How often somebody who waits is asked whether that is still wanted.
GIVEN_UP_EVERY_SECONDS = 0.1

T = TypeVar("T")


def never() -> bool:
    """Nothing is given up."""
    return False


def wait_for(
    get: Callable[[float], T], timeout_seconds: float | None, is_given_up: Callable[[], bool]
) -> T:
    """What comes from another process.

    Args:
        get: waits this many seconds for it; raises :class:`queue.Empty` if it has not come.
        timeout_seconds: how long to wait in all; None: for ever.
        is_given_up: asked again and again meanwhile.

    Raises:
        WorkerHungError: it did not come in time.
        WorkerReleasedError: it was given up.
    """
    deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        left = deadline - time.monotonic()
        try:
            return get(min(max(left, 0), GIVEN_UP_EVERY_SECONDS))
        except Empty:
            if left <= 0:
                raise WorkerHungError(timeout_seconds or 0) from None
            if is_given_up():
                raise WorkerReleasedError from None
