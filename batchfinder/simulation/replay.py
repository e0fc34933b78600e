"""A trace replayed in an allocator: does this batch size fit, and with what peaks?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from batchfinder.probing.steadiness import STEADY_STEPS
from batchfinder.simulation.allocator.caching import Block, CachingAllocator, DeviceFullError
from batchfinder.simulation.gpus import NO_GPU, Gpu
from batchfinder.simulation.trace.trace import EMPTY_CACHE, GeneralTrace, Stage

# After so many further steps the result stands, steady or not.
MAX_STEPS = 10


@dataclass(frozen=True)
class Replay:
    """What a replay showed.

    Attributes:
        room: for about how many more examples there is room, unless the cache is given back; below
            0: it ran out of memory, and would have gone on with about so many less.
        stage_peak_bytes: most bytes in use in each stage, up to the failure if there was one.
        peak_allocated_bytes: the highest of them.
        peak_reserved_bytes: most bytes taken from the device.
        retries: how often the allocator had to give back its cache in the last step.
    """

    room: float
    stage_peak_bytes: Mapping[Stage, int]
    peak_reserved_bytes: int
    retries: int

    @property
    def fits(self) -> bool:
        """Whether every storage found its place."""
        return self.room >= 0

    @property
    def trains(self) -> bool:
        """Whether it fits without flushing the allocator's cache in every step."""
        return self.fits and not self.retries

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes in use at any moment."""
        return max(self.stage_peak_bytes.values(), default=0)


def replay(
    trace: GeneralTrace, batch_size: int, allocator: CachingAllocator, gpu: Gpu = NO_GPU
) -> Replay:
    """Serve every birth and death of a trace, and of further steps like its last one.

    What a step leaves to the next comes to lie elsewhere than before, and with it all that follows:
    memory that served two steps may not serve the third. So steps are run until what is reserved is
    steady and none flushes the cache, as in a confirmation.

    Args:
        trace: of some training steps.
        batch_size: examples per forward/backward pass.
        allocator: fresh; it keeps the state in which the steps left it.
        gpu: that trains.
    """
    sizes = trace.sizes(batch_size, gpu)
    blocks: list[Block | None] = [None] * len(sizes)
    peaks: dict[Stage, int] = {}

    def run(parts: Iterable[tuple[int, int, Stage]]) -> int:
        for start, end, stage in parts:
            missing_bytes = _serve(trace, trace.events[start:end], sizes, blocks, allocator)
            peaks[stage] = max(allocator.peak_allocated_bytes, peaks.get(stage, 0))
            allocator.peak_allocated_bytes = allocator.allocated_bytes
            if missing_bytes:
                return missing_bytes
        return 0

    last_step = trace.parts(trace.last_step, len(trace.events))
    missing_bytes = run(trace.parts(0, trace.last_step))
    retries = allocator.retries
    steady = 0
    for _ in range(MAX_STEPS):
        if missing_bytes:
            break
        retries, reserved = allocator.retries, allocator.peak_reserved_bytes
        missing_bytes = run(last_step)
        is_as_before = (allocator.retries, allocator.peak_reserved_bytes) == (retries, reserved)
        steady = steady + 1 if is_as_before else 0
        if steady == STEADY_STEPS or trace.successors is None:
            break
        for found, left in trace.successors:
            blocks[found] = blocks[left]
    return Replay(
        _room(trace, batch_size, allocator, missing_bytes),
        peaks,
        allocator.peak_reserved_bytes,
        allocator.retries - retries,
    )


def _room(
    trace: GeneralTrace, batch_size: int, allocator: CachingAllocator, missing_bytes: int
) -> float:
    capacity = allocator.capacity_bytes
    if capacity is None:
        return math.inf
    left = -missing_bytes if missing_bytes else max(0, capacity - allocator.peak_reserved_bytes)
    growth = trace.highest_at(batch_size, list(Stage)).growth_at(batch_size)
    # Where no other size is known, what is needed passes for proportional to the size.
    return left / (growth or max(1, capacity - left) / batch_size)


def _serve(
    trace: GeneralTrace,
    events: list[int],
    sizes: list[int],
    blocks: list[Block | None],
    allocator: CachingAllocator,
) -> int:
    """Serve some events; returns how many bytes were missing for the last one, or 0."""
    malloc, free = allocator.malloc, allocator.free
    for event in events:
        if event >= 0:
            try:
                blocks[event] = malloc(size) if (size := sizes[event]) else None
            except DeviceFullError as error:
                if not trace.example.storages[event].optional:
                    return error.missing_bytes
                blocks[event] = None
        elif event == EMPTY_CACHE:
            allocator.release_cached()
        else:
            block = blocks[~event]
            if block is not None:
                free(block)
    return 0
