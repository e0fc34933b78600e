"""A search on the CPU that stays in this very process, as searches on accelerators do.

On the CPU ``find_max_batch`` itself goes to other processes.
"""

from __future__ import annotations

from typing import Any

from batchfinder import BatchSizeResult, TrainingSetup
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.here import Here
from batchfinder.probing.workers.supervisor import Supervisor
from batchfinder.search.bounds import Bounds
from batchfinder.search.run import run_search


def search_here(
    setup: TrainingSetup, max_batch_size: int | None = None, **options: Any
) -> BatchSizeResult:
    """Search in this process, and put everything back.

    Args:
        setup: complete: with a sample or a ``make_batch``.
        max_batch_size: the largest size to try; None: none.
        options: of :class:`~batchfinder.probing.options.ProbeOptions`.
    """
    prober = Supervisor(Here(setup), ProbeOptions(device="cpu", **options))
    try:
        return run_search(prober, Bounds.of(largest=max_batch_size))
    finally:
        prober.close()
