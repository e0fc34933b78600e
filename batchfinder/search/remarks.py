"""Warnings and notes about how a search ended. Imports no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence

from batchfinder.results.probe import (
    FORESEEN_NOTE,
    LEAK_WARNING,
    SHORT_LIVED_NOTE,
    Outcome,
    Probe,
    without_place,
)
from batchfinder.results.result import Status
from batchfinder.results.throughput import Throughput
from batchfinder.search.bounds import Bounds
from batchfinder.search.head_start import Guess, worth_naming
from batchfinder.search.plan import DIFFERING_ROOM, VARIED_ROOM
from batchfinder.search.prober import Prober
from batchfinder.search.search import Finding
from batchfinder.units import format_bytes, format_rate

# The allocator got the budget if it holds this share of it: other processes took no more.
MOST_OF_BUDGET = 0.9

# A device is full if less than this share of it is free.
FULL = 0.01

# glibc then maps tensors of 1 MiB or more separately, without holes. Huge pages save some of the
# cost (https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html;
# measured in scripts/results/search_cpu_mapped.json).
WITHOUT_HOLES = (
    "Larger batches, but slower steps: set this for the search and for training: "
    "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1"
)

# A setting of the allocator, named where a size that failed would fit under it.
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def warnings_about(
    finding: Finding,
    probes: Sequence[Probe],
    prober: Prober,
    bounds: Bounds,
    *,
    expanded: Callable[[int], Guess | None] | None,
) -> Iterator[str]:
    """Yield warnings, which ask the user to act.

    Args:
        finding: how the search ended.
        probes: all probes, in the order in which they ran.
        prober: the prober that ran them.
        bounds: the sizes that it could try.
        expanded: guesses the largest size under expandable segments, from the answer without. None
            if the device's allocator has none, or they are on.
    """
    if (free := _crowded(finding.answer, probes, prober)) is not None:
        yield (
            f"only {format_bytes(max(0, free))} of the device are free in a step at the answer: "
            "kernels, libraries or other processes have used what should stay free. Later steps "
            "may run out of memory. Try a larger headroom"
        )
    if finding.status is Status.TIME_LIMIT:
        return
    if finding.failure is None:
        if finding.answer and bounds.is_open:
            yield (
                f"nothing ran out of memory up to a batch of {bounds.last}; give the size "
                "of your data set as the largest batch size"
            )
        return
    if finding.answer is None:
        return
    answer, failure = finding.answer.batch_size, finding.failure.batch_size
    used_the_budget = _used_the_budget(finding.answer, finding.failure, prober)
    if failure > bounds.after(answer) and prober.is_repeatable and not used_the_budget:
        yield (
            f"batch size {failure} failed before it reached the memory limit, and sizes between "
            f"{answer} and {failure} were not tried. Check its error"
        )
    # A replay repeats the steps, but not every launch of a script has its validation recorded.
    is_in_step = not without_place(finding.failure.note)[1]
    is_oom = finding.failure.outcome is Outcome.OOM
    if is_oom and is_in_step and used_the_budget and expanded:
        guess = expanded(answer)
        least = guess.size * (1 - guess.deviation) if guess else 0
        size = min(bounds.at_most(round(least)), bounds.last)
        if guess and guess.size >= worth_naming(answer, guess.deviation) and size >= failure:
            yield (
                f"{EXPANDABLE} would fit a batch of about {size}, as a replay of this "
                "search's requests shows. Set it for the search and for your run"
            )


def warnings_of_holes(holes: Sequence[Probe]) -> Iterator[str]:
    """Yield a warning if sizes below the answer failed for another reason than memory."""
    if holes:
        sizes = " and ".join(str(hole.batch_size) for hole in holes)
        yield (
            f"batches of {sizes} failed for another reason than memory, and larger ones did not, "
            f"so above them only powers of two were tried: {holes[-1].note}"
        )


def notes_about(finding: Finding, prober: Prober, bounds: Bounds) -> Iterator[str]:
    """Yield notes that explain the answer but ask for no action. Only ``-v`` shows them.

    Args:
        finding: how the search ended.
        prober: the prober that ran it.
        bounds: the sizes that it could try.
    """
    outside = finding.answer.outside_bytes if finding.answer else None
    if outside:
        yield (
            f"outside PyTorch's allocator, {format_bytes(outside)} of the device were in use: the "
            "CUDA context, kernels and libraries, and other processes. The budget was "
            f"{format_bytes(prober.budget_bytes)}"
        )
    is_final = finding.status is not Status.TIME_LIMIT
    if finding.failure is None or finding.answer is None or not is_final:
        return
    answer, failure = finding.answer.batch_size, finding.failure.batch_size
    if finding.answer.steps_differ and prober.recordings is not None:  # they are replayed
        yield (
            "steps request different memory, as where lengths vary, layers are skipped at random, "
            f"or tensors pile up, so {VARIED_ROOM:.0%} to {DIFFERING_ROOM:.0%} of the budget stays "
            "free for steps that did not run"
        )
    if failure > bounds.after(answer):
        if not prober.is_repeatable:
            yield (
                f"sizes between {answer} and {failure} fit in some runs only: memory varies from "
                "run to run on this device"
            )
        elif _used_the_budget(finding.answer, finding.failure, prober):
            yield (
                f"sizes between {answer} and {failure} were not tried: the allocator's memory is "
                "fragmented there, so which of them fit is a matter of chance"
            )
    leaks = LEAK_WARNING in prober.warnings
    # If the tensors themselves were too large, the first step would have failed.
    if finding.failure.steps > 1 and not leaks and prober.device == "cpu" and may_leave_holes():
        yield (
            "tensors leave holes in the heap, so memory varies from step to step. Those above "
            f"32 MiB leave none, so a size well above {failure} may train too: try it as the "
            f"smallest size. {WITHOUT_HOLES}"
        )


def _used_the_budget(answer: Probe, failure: Probe, prober: Prober) -> bool:
    """Return True if the allocator got most of the budget, or would with one example more.

    If not, other processes took the rest, or each step needs more memory than the one before.
    A replay that ran out of memory got all of the budget, whatever the steps before it got.
    """
    if failure.note in (SHORT_LIVED_NOTE, FORESEEN_NOTE):
        return True
    with_one_more = (answer.peak_reserved_bytes or 0) * (1 + 1 / answer.batch_size)
    kept = max(with_one_more, failure.peak_reserved_bytes or 0)
    return kept >= MOST_OF_BUDGET * prober.budget_bytes


def _crowded(answer: Probe | None, probes: Sequence[Probe], prober: Prober) -> int | None:
    """Return the free bytes of a device that is full, although some should stay free; else None."""
    if answer is None or not answer.outside_bytes:
        return None
    capacity, outside = prober.capacity_bytes or 0, answer.outside_bytes
    free = capacity - outside - (answer.peak_reserved_bytes or 0)
    # The first size that fits decides the budget.
    before = next((probe.outside_bytes or 0 for probe in probes if probe.fits), 0)
    headroom = capacity - before - prober.budget_bytes
    return free if free < FULL * capacity < headroom / 2 else None


def may_leave_holes(environment: Iterable[str] = ()) -> bool:
    """Return True if glibc allocates the CPU's tensors, with its own settings.

    Args:
        environment: the names of variables that a script gets beside those of this process.
    """
    names = {"GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD"}
    return platform.libc_ver()[0] == "glibc" and names.isdisjoint([*os.environ, *environment])


def loader_remarks(loader_rate: float, throughput: Throughput) -> list[str]:
    """Say that the data loader is the limit, if it yields fewer examples than the steps train on.

    Args:
        loader_rate: examples per second that the loader yields by itself.
        throughput: the speed of the steps.
    """
    best = max(throughput.rates, key=lambda rate: rate.samples_per_second)
    if loader_rate >= best.samples_per_second:
        return []
    return [
        f"the data loader is the limit: it yields {format_rate(loader_rate)} samples/s by itself, "
        f"and steps at {best.batch_size} train on {format_rate(best.samples_per_second)}. Try more "
        "num_workers, or cheaper transforms"
    ]
