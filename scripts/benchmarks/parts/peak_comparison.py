"""The peak of a training step: as measured on the device, and as simulated."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import TypeVar

from batchfinder import TrainingSetup, estimate_peak_memory, find_max_batch

T = TypeVar("T")


class NotRunError(Exception):
    """The step did not run; the text says why."""


def in_a_fork(function: Callable[..., T], *arguments: object) -> T:
    """What a function returns, run where no case before has left anything in the allocator.

    What it raises comes back as well. This process must not use the device itself.
    """
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def compared(setup: TrainingSetup, precision: str, batch_size: int) -> dict[str, float]:
    """The highest peak of bytes allocated in two steps, in MiB.

    Raises:
        NotRunError: the step did not run.
        Exception: what the search and the estimate raise.
    """
    result = find_max_batch(
        setup, device="cuda", precision=precision, min_batch_size=batch_size,
        max_batch_size=batch_size,
    )  # fmt: skip
    peak = result.probes[-1].peak_allocated_bytes
    if not result.batch_size or peak is None:
        raise NotRunError(f"the step did not run: {result.probes[-1].note}")
    simulated = estimate_peak_memory(
        setup, gpu="h200", precision=precision, batch_size=batch_size
    ).peak_allocated_bytes
    return {
        "measured_mib": round(peak / 2**20, 3),
        "simulated_mib": round(simulated / 2**20, 3),
        "difference": round(simulated / peak - 1, 5),
    }
