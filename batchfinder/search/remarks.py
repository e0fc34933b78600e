"""What the user should know of how a search ended. Imports no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator

from batchfinder.results.result import LEAK_WARNING, Outcome
from batchfinder.search.bounds import UNLIMITED_BATCH_SIZE
from batchfinder.search.prober import Prober
from batchfinder.search.search import Finding
from batchfinder.simulation.allocator.caching import AllocatorSettings
from batchfinder.units import format_bytes

# Where the tensors of the answer take less of the budget than this, a tenth of it is of no use.
MOSTLY_TENSORS = 0.9

# Tensors from 1 MiB on lie apart and leave no holes; huge pages save part of the time that takes
# (https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html; measured in
# scripts/results/search_cpu_mapped.json).
WITHOUT_HOLES = "glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1"


def remarks_on(
    finding: Finding, prober: Prober, max_batch_size: int | None, multiple_of: int
) -> Iterator[str]:
    """What there is to say of a finding, each time with what to do about it.

    Args:
        finding: how the search ended.
        prober: that ran it.
        max_batch_size: the largest size that was allowed; None: any.
        multiple_of: what every size was a multiple of.
    """
    if finding.failure is None:
        if finding.answer and max_batch_size is None:
            yield (
                f"nothing ran out of memory up to a batch of {UNLIMITED_BATCH_SIZE}; give the size "
                "of your data set as the largest batch size"
            )
        return
    if finding.answer is None:
        return
    answer, failure = finding.answer.batch_size, finding.failure.batch_size
    kept = max(finding.answer.peak_reserved_bytes or 0, finding.failure.peak_reserved_bytes or 0)
    # Where it got no more, others have taken the rest, or each step needs more than the one before.
    used_the_budget = kept >= MOSTLY_TENSORS * prober.budget_bytes
    if failure - answer > multiple_of:
        between = f"sizes between {answer} and {failure} were not tried"
        if not prober.is_repeatable:
            yield (
                f"from {answer} to {failure} it depends on the run what fits: the same size needs "
                "a little more or less memory each time on this device"
            )
        elif used_the_budget:
            yield (
                f"{between}: the allocator is fragmented there, and it is chance which of them it "
                "has room for"
            )
        else:
            yield f"{between}: see why {failure} failed, without having used the budget"
    held = finding.answer.peak_allocated_bytes
    ran_out = finding.failure.outcome is Outcome.OOM and used_the_budget
    if held and ran_out and held < MOSTLY_TENSORS * prober.budget_bytes and _may_expand(prober):
        yield (
            f"the allocator is so fragmented that tensors take only {format_bytes(held)} of the "
            f"{format_bytes(prober.budget_bytes)}; PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:True, for search and training, may leave room for more"
        )
    leaks = LEAK_WARNING in prober.warnings
    # Had it been the tensors themselves, the first step would have failed.
    if finding.failure.steps > 1 and not leaks and _may_leave_the_heap(prober):
        yield (
            "memory differs from step to step, as tensors leave holes in the heap: "
            f"GLIBC_TUNABLES={WITHOUT_HOLES}, for search and training, leaves room for more, "
            "and makes steps slower"
        )


def _may_leave_the_heap(prober: Prober) -> bool:
    """Whether glibc allocates the tensors, by settings that the user has not touched."""
    environment = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")
    return (
        prober.device == "cpu"
        and platform.libc_ver()[0] == "glibc"
        and not any(os.environ.get(name) for name in environment)
    )


def _may_expand(prober: Prober) -> bool:
    """Whether the allocator has a setting against fragmentation that the user has not made."""
    return (
        prober.device.startswith("cuda")
        and not AllocatorSettings.of_this_process().expandable_segments
    )
