"""Warn of loops that clear the gradients late: between forward and backward pass.

A search clears them after the optimizer's step, so they need no memory in the next forward pass.
"""

from __future__ import annotations

from batchfinder.probing.attempt import Run
from batchfinder.results.memory_model import Phase
from batchfinder.training.step import TrainingStep
from batchfinder.units import format_bytes


def late_gradients_warning(step: TrainingStep, run: Run, memory_bytes: float) -> str:
    """Return the warning if late gradients would not fit beside a forward pass; else "".

    The run is a confirmation that fits. The loop may use the memory with the search's headroom.
    """
    late_bytes = step.late_gradient_bytes
    unused_bytes = run.reserved_bytes - run.allocated_bytes  # lost to holes
    forward_bytes = run.phase_peak_bytes.get(Phase.FORWARD, 0) + unused_bytes
    if not late_bytes or forward_bytes + late_bytes <= memory_bytes:
        return ""
    return (
        "a loop that calls zero_grad() between forward and backward pass holds "
        f"{format_bytes(late_bytes)} of old gradients meanwhile, and may run out of memory at the "
        "answer. Try calling it after optimizer.step()"
    )
