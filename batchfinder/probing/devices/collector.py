"""Python's garbage collector, limited to the objects that probes make, or off for a while."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def older_objects_spared() -> Iterator[None]:
    """Let collections in the block look only at objects that were made in it.

    A process that has imported PyTorch and a library of models holds about a million objects.
    Looking at all of them takes longer than many training steps, and no garbage of a probe is
    among them. If the user has frozen objects already (``gc.freeze``), nothing changes, because
    theirs and ours could not be separated afterwards.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Collect no garbage in the block.

    Imports leave little, and are a quarter faster. Traces free their memory in the same order.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
