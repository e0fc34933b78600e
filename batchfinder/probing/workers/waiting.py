"""Wait for another process, with a time limit and a way to give up. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from queue import Empty
from typing import TypeVar

from batchfinder.errors import WorkerHungError, WorkerReleasedError

# Time between two checks whether to give up a wait.
GIVEN_UP_EVERY_SECONDS = 0.1

T = TypeVar("T")


def never() -> bool:
    """Return False: never give up."""
    return False


def wait_for(
    get: Callable[[float], T], timeout_seconds: float | None, is_given_up: Callable[[], bool]
) -> T:
    """Wait for an item from another process, and return it.

    Args:
        get: waits for the item for the given seconds; raises :class:`queue.Empty` without one.
        timeout_seconds: time to wait in total; None to wait forever.
        is_given_up: called repeatedly while waiting. True ends the wait.

    Raises:
        WorkerHungError: the item did not come in time.
        WorkerReleasedError: ``is_given_up`` returned True.
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
