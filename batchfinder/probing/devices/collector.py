"""Python's collector of reference cycles, kept to what probes make."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def older_objects_spared() -> Iterator[None]:
    """Have collections inside look only at objects that were made inside.

    A process that has imported PyTorch and a library of models holds about a million objects, and
    looking at all of them takes longer than many a training step; nothing that a probe leaves is
    among them. Where somebody else has set objects aside already (``gc.freeze``), it is left at
    that, because theirs cannot be told from ours afterwards.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
