"""What tests ask of other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 60


def eventually(condition: Callable[[], Any]) -> Any:
    """What a condition gives as soon as it holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing within {PATIENCE_SECONDS} s")


def is_gone(pid: int) -> bool:
    """Whether there is no such process any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
