"""A trace replayed in an allocator: does this batch size fit, and with what peaks?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from batchfinder.simulation.allocator import Block, CachingAllocator, DeviceFullError
from batchfinder.simulation.trace import EMPTY_CACHE, AffineTrace, Stage


@dataclass(frozen=True)
class Replay:
    """What a replay showed.

    Attributes:
        fits: whether every storage found its place.
        stage_peak_bytes: most bytes in use in each stage, up to the failure if there was one.
        peak_allocated_bytes: the highest of them.
        peak_reserved_bytes: most bytes taken from the device.
        retries: how often the allocator had to give back its cache in the last step.
    """

    fits: bool
    stage_peak_bytes: Mapping[Stage, int]
    peak_reserved_bytes: int
    retries: int

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes in use at any moment."""
        return max(self.stage_peak_bytes.values(), default=0)


def replay(trace: AffineTrace, batch_size: int, allocator: CachingAllocator) -> Replay:
    """Serve every birth and death of a trace.

    Args:
        trace: of some training steps.
        batch_size: examples per forward/backward pass.
        allocator: fresh; it keeps the state in which the trace left it.
    """
    sizes = trace.sizes(batch_size)
    blocks: list[Block | None] = [None] * len(sizes)
    stages = [*trace.example.stages, (len(trace.events), Stage.OPTIMIZER)]
    peaks: dict[Stage, int] = {}
    retries = 0
    fits = True
    for (start, stage), (end, _) in pairwise(stages):
        if start <= trace.last_step:
            retries = allocator.retries
        fits = _serve(trace, trace.events[start:end], sizes, blocks, allocator)
        peaks[stage] = max(allocator.peak_allocated_bytes, peaks.get(stage, 0))
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        if not fits:
            break
    return Replay(fits, peaks, allocator.peak_reserved_bytes, allocator.retries - retries)


def _serve(
    trace: AffineTrace,
    events: list[int],
    sizes: list[int],
    blocks: list[Block | None],
    allocator: CachingAllocator,
) -> bool:
    malloc, free = allocator.malloc, allocator.free
    for event in events:
        if event >= 0:
            try:
                blocks[event] = malloc(sizes[event])
            except DeviceFullError:
                if not trace.example.storages[event].optional:
                    return False
                blocks[event] = None
        elif event == EMPTY_CACHE:
            allocator.release_cached()
        else:
            block = blocks[~event]
            if block is not None:
                free(block)
    return True


def largest_that_fits(
    fits: Callable[[int], bool],
    bound: int | None,
    *,
    smallest: int = 1,
    multiple_of: int = 1,
    expected_share: float = 1.0,
) -> int:
    """The largest size that fits; 0 if not even the smallest does.

    Args:
        fits: whether a size does.
        bound: no size above fits, and the answer is a few percent below: fragmentation is all
            that the bound of a trace leaves out. None: there is none.
        smallest: no size below is tried.
        multiple_of: only multiples of this are tried.
        expected_share: of the bound, near which the answer is looked for first.

    Example:
        >>> largest_that_fits(lambda size: size <= 97, 100)
        97
    """
    low = first = -(-smallest // multiple_of) - 1
    high = ((1 << 20) if bound is None else bound) // multiple_of + 1
    # Away from where it is expected in growing strides, until it lies in between; then bisection.
    stride = max(1, high // (64 if expected_share == 1.0 else 256))
    middle = min(round(high * expected_share), high - 1)
    direction = 0
    while high - low > 1:
        middle = min(max(middle, low + 1), high - 1)
        does_fit = fits(middle * multiple_of)
        low, high = (middle, high) if does_fit else (low, middle)
        if direction == (-1 if does_fit else 1):
            stride = 0
        direction = 1 if does_fit else -1
        middle = middle + direction * stride if stride else (low + high) // 2
        stride *= 2
    return 0 if low == first else low * multiple_of
