from __future__ import annotations

from batchfinder.search.prober import Recording
from batchfinder.simulation.allocator.caching import AllocatorSettings
from batchfinder.simulation.rehearsal import paired, rehearsed
from batchfinder.units import MIB


def recorded(batch_size: int, extra: int = 0) -> Recording:
    """Four steps that hold 4 MiB for each example at once, beside weights of 100 MiB."""
    steps = []
    for step in range(4):
        first = 1 + 3 * step
        asked = [MIB * batch_size, 2 * MIB * batch_size, MIB * batch_size + extra]
        steps.append([*asked, *(~(first + i) for i in range(3))])
    return Recording([100 * MIB], steps)


def test_two_small_recordings_tell_the_largest_size() -> None:
    recordings = {2: recorded(2), 20: recorded(20)}
    size = rehearsed(recordings, 500 * MIB, AllocatorSettings())
    assert size is not None
    assert 97 <= size <= 100


def test_one_recording_or_one_that_does_not_grow_tells_nothing() -> None:
    assert rehearsed({20: recorded(20)}, 500 * MIB, AllocatorSettings()) is None
    assert rehearsed({2: recorded(2), 20: recorded(2)}, 500 * MIB, AllocatorSettings()) is None


def test_requests_that_only_one_of_two_steps_makes_are_left_out() -> None:
    small, large = [10 * MIB, MIB, 5 * MIB], [20 * MIB, 70 * MIB, 2 * MIB, 10 * MIB]
    assert paired(small, large, ratio=2) == [10 * MIB, None, MIB, 5 * MIB]
