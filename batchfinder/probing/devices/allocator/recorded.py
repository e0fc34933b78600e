"""Replay the recorded steps of a confirmation, and see how it goes on. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from batchfinder.probing.devices.allocator.block import Block
from batchfinder.probing.devices.allocator.caching import (
    AllocatorSettings,
    CachingAllocator,
    DeviceFullError,
)
from batchfinder.probing.devices.allocator.expandable import allocator_of
from batchfinder.probing.steadiness import PeakWatch
from batchfinder.search.prober import Recording


def replayed(
    recording: Recording, allocator: CachingAllocator, most_steps: int
) -> Iterator[tuple[int, int]]:
    """Replay steps; yield each one's peak of reserved bytes, and how often it flushed the cache.

    After the recorded steps, the last one is repeated if it makes as many requests as the one
    before.
    """
    malloc, free, steps = allocator.malloc, allocator.free, recording.steps
    streams = recording.streams or [0] * (len(recording.held) + sum(map(len, steps)))
    held = zip(recording.held, streams, strict=False)
    blocks: list[Block | None] = [malloc(size, stream) if size else None for size, stream in held]
    allocator.release_cached()
    first = len(blocks)  # blocks held from the start are the same in every step
    counts = counts_of(steps)
    for number in range(most_steps):
        repeats = max(0, number - len(steps) + 1)
        if repeats and counts[-1:] != counts[-2:-1]:
            return
        shift = repeats * counts[-1]
        retries = allocator.retries
        allocator.peak_reserved_bytes = allocator.reserved_bytes
        for event in steps[number - repeats]:
            if event >= 0:
                blocks.append(malloc(event, streams[len(blocks) - shift]) if event else None)
            else:
                index = ~event if ~event < first else ~event + shift
                block, blocks[index] = blocks[index], None
                if block is not None:
                    free(block)
        yield allocator.peak_reserved_bytes, allocator.retries - retries


def foreseen(
    record: Callable[[], Mapping[str, Any] | None], watch: PeakWatch, budget_bytes: int
) -> PeakWatch:
    """Return a watch of a confirmation that also saw the steps that would follow, as simulated.

    The simulation is believed if the last two steps made the same requests, and if it reproduces
    the peak of each step that ran to the byte. If it is not, or if a later step would not fit, the
    watch is returned as it is: real steps have to show it.

    Args:
        record: returns the fields of a recording of the steps that ran; None if there is none.
        watch: what watched these steps. It is not changed.
        budget_bytes: the bytes that the allocator may reserve.
    """
    if watch.is_over or not watch.may_end or not (recorded := record()):
        return watch
    recording = Recording(**recorded)
    if len(set(map(requests_of, recording.steps[-2:]))) != 1:
        return watch
    allocator = allocator_of(budget_bytes, AllocatorSettings.of_this_process())
    later = deepcopy(watch)
    try:
        for number, (peak, flushes) in enumerate(replayed(recording, allocator, watch.most_steps)):
            if number >= len(watch.peaks):
                later.note(peak, flushes)
            elif peak != watch.peaks[number]:
                return watch
            if later.is_over:
                break
    except DeviceFullError:
        return watch
    return later if later.is_settled and not later.objection() else watch


def steps_differ(recording: Recording) -> bool:
    """Return True if steps after the first do not all make the same number of requests."""
    return len(set(counts_of(recording.steps[1:]))) > 1


def counts_of(steps: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of blocks that each step requests."""
    return [len(requests_of(step)) for step in steps]


def requests_of(step: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of each request of a step."""
    return tuple(event for event in step if event >= 0)
