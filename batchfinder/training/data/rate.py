"""The speed of a loader by itself: whether the data can keep up with the steps."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import DataLoader

from batchfinder.training.data.loader import examples_of, training_loader
from batchfinder.training.tree import named_tensors

# Seconds of reading after the first batches. Caches and worker processes are warm by then.
SECONDS = 3.0
BATCH_SIZE = 32  # for a data set without a loader


def samples_per_second(loader: Any, seconds: float = SECONDS) -> float:
    """Read a loader or a data set for a few seconds and return its examples per second.

    The first batches do not count: they wait for worker processes to start, and those that workers
    have read ahead meanwhile cost nothing. A loader that ends earlier counts as a whole.
    """
    loader = training_loader(loader)
    if not hasattr(loader, "dataset"):
        dataset, collate, _ = examples_of(loader, "the loader")
        loader = DataLoader(dataset, BATCH_SIZE, collate_fn=collate)
    workers = getattr(loader, "num_workers", 0)
    ahead = 1 + workers * (getattr(loader, "prefetch_factor", None) or 0)
    begun = counted_from = time.perf_counter()
    total = counted = 0
    for number, batch in enumerate(loader, 1):
        examples = next((tensor.shape[0] for _, tensor in named_tensors(batch) if tensor.dim()), 1)
        now = time.perf_counter()
        total += examples
        if number <= ahead:
            counted_from = now
            continue
        counted += examples
        if now - counted_from > seconds:
            break
    now = time.perf_counter()
    if counted <= total / 2:
        return total / max(now - begun, 1e-9)
    return counted / max(now - counted_from, 1e-9)
