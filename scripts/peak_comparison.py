"""The peak of a training step: as measured on the device, and as simulated."""

from __future__ import annotations

import gc

import torch

from batchfinder import TrainingSetup, estimate_peak_memory, find_max_batch


class NotRunError(Exception):
    """The step did not run; the text says why."""


def compared(setup: TrainingSetup, precision: str, batch_size: int) -> dict[str, float]:
    """The highest peak of bytes allocated in two steps, in MiB.

    Raises:
        NotRunError: the step did not run.
        Exception: what the search and the estimate raise.
    """
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()  # some models whose step fails keep what it has made
    result = find_max_batch(
        setup, device="cuda", precision=precision, min_batch_size=batch_size,
        max_batch_size=batch_size,
    )  # fmt: skip
    peak = result.probes[-1].peak_allocated_bytes
    if not result.batch_size or peak is None:
        raise NotRunError(f"the step did not run: {result.probes[-1].note}")
    measured = peak - left
    simulated = estimate_peak_memory(
        setup, gpu="h200", precision=precision, batch_size=batch_size
    ).peak_allocated_bytes
    return {
        "measured_mib": round(measured / 2**20, 3),
        "simulated_mib": round(simulated / 2**20, 3),
        "difference": round(simulated / measured - 1, 5),
    }
