"""Replay a trace in an allocator, to find its peaks and whether the batch size fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from batchfinder.probing.devices.allocator.blocks import Block
from batchfinder.probing.devices.allocator.caching import CachingAllocator, DeviceFullError
from batchfinder.probing.steadiness import STEADY_STEPS
from batchfinder.simulation.gpus import NO_GPU, Gpu
from batchfinder.simulation.trace.trace import EMPTY_CACHE, GeneralTrace, Stage

# Steps to repeat at most until the allocator is steady.
MAX_STEPS = 10


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        room: roughly how many more examples fit without releasing the cache. Below 0, memory ran
            out, and roughly that many examples were too many.
        stage_peak_bytes: most bytes in use in each stage, up to the failure if there was one.
        peak_reserved_bytes: most bytes reserved on the device.
        retries: times the allocator released its cache in the last step.
    """

    room: float
    stage_peak_bytes: Mapping[Stage, int]
    peak_reserved_bytes: int
    retries: int

    @property
    def fits(self) -> bool:
        """True if every storage was allocated."""
        return self.room >= 0

    @property
    def trains(self) -> bool:
        """True if it fits without flushing the allocator's cache in every step."""
        return self.fits and not self.retries

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes in use at any moment."""
        return max(self.stage_peak_bytes.values(), default=0)


def replay(
    trace: GeneralTrace, batch_size: int, allocator: CachingAllocator, gpu: Gpu = NO_GPU
) -> ReplayResult:
    """Replay every allocation and release of a trace, then repeat its last step.

    Tensors that a step leaves for the next one move to other addresses. Memory that is enough for
    two steps may therefore not be enough for the third. Steps are repeated until the reserved bytes
    are steady and no step flushes the cache, as in a confirmation. The allocator has to be fresh.
    """
    sizes = trace.sizes(batch_size, gpu)
    blocks: list[Block | None] = [None] * len(sizes)
    peaks: dict[Stage, int] = {}

    def run(parts: Iterable[tuple[int, int, Stage]]) -> float:
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
    return ReplayResult(
        _room(trace, batch_size, allocator, missing_bytes),
        peaks,
        allocator.peak_reserved_bytes,
        allocator.retries - retries,
    )


def _room(
    trace: GeneralTrace, batch_size: int, allocator: CachingAllocator, missing_bytes: float
) -> float:
    capacity = allocator.capacity_bytes
    left = -missing_bytes if missing_bytes else max(0, capacity - allocator.peak_reserved_bytes)
    growth = trace.highest_at(batch_size, list(Stage)).growth_at(batch_size)
    # If only one size was traced, assume memory proportional to it.
    return left / (growth or max(1, capacity - left) / batch_size)


def _serve(
    trace: GeneralTrace,
    events: list[int],
    sizes: list[int],
    blocks: list[Block | None],
    allocator: CachingAllocator,
) -> float:
    """Replay some events; return the bytes missing for the last one, or 0."""
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
