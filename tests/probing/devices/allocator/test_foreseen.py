"""Steps that can be foreseen need not run, but only where the simulation was right so far."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchfinder.probing.devices.allocator.caching import (
    AllocatorSettings,
    CachingAllocator,
    DeviceFullError,
)
from batchfinder.probing.devices.allocator.recorded import Replay, foreseen
from batchfinder.probing.steadiness import PeakWatch
from batchfinder.search.prober import Recording
from batchfinder.units import MIB

BUDGET = 1000 * MIB


def recorded(
    first: Sequence[int], later: Sequence[int], kept: int = 0, count: int = 3
) -> Recording:
    """Steps that request some MiB, and release all but the first ``kept`` of them at their end."""
    steps: list[list[int]] = []
    blocks = 0
    for asked in (first, *[later] * (count - 1)):
        end = blocks + len(asked)
        steps.append([*(size * MIB for size in asked), *(~i for i in range(blocks + kept, end))])
        blocks = end
    return Recording([], steps)


def watched(recording: Recording) -> PeakWatch:
    """The watch of a confirmation after the recorded steps."""
    watch = PeakWatch(BUDGET, least_steps=3, peaks_wander=False)
    allocator = CachingAllocator(BUDGET, AllocatorSettings())
    for peak, flushes in Replay(recording, allocator).steps(len(recording.steps)):
        watch.note(peak, flushes)
    return watch


def test_steps_that_would_follow_are_foreseen() -> None:
    recording = recorded([100], [100, 30])  # a peak that is new in the second step
    watch = watched(recording)
    assert not watch.is_over
    later = foreseen(recording._asdict, watch, BUDGET)
    assert later.is_settled
    assert not later.objection()
    assert later.peaks == [100 * MIB, 130 * MIB, 130 * MIB, 130 * MIB]
    assert len(watch.peaks) == 3


@pytest.mark.parametrize(
    "recording",
    [
        pytest.param(recorded([100], [100, 30], count=2), id="may-not-end-yet"),
        pytest.param(
            recorded([100], [100, 30])._replace(
                steps=[[100 * MIB, ~0], [130 * MIB, ~1], [100 * MIB, 30 * MIB, ~2, ~3]]
            ),
            id="steps-differ",
        ),
    ],
)
def test_real_steps_go_on_where_others_would_not_do(recording: Recording) -> None:
    watch = watched(recording)
    assert foreseen(recording._asdict, watch, BUDGET) is watch


def test_a_simulation_that_was_wrong_about_a_step_is_not_believed() -> None:
    recording = recorded([100], [100, 30])
    watch = watched(recording)
    watch.peaks[1] += 512
    assert foreseen(recording._asdict, watch, BUDGET) is watch
    assert foreseen(lambda: None, watch, BUDGET) is watch
    assert foreseen(recording._asdict, watched(recording), 120 * MIB).is_refused is False


sizes = st.lists(st.integers(1, 400), min_size=1, max_size=6)


@given(sizes, sizes, st.integers(0, 1), st.integers(2, 3))
def test_a_foreseen_end_is_that_of_the_steps_themselves(
    first: list[int], later: list[int], kept: int, count: int
) -> None:
    recording = recorded(first, later, kept, count)
    try:
        watch = watched(recording)
    except DeviceFullError:
        assume(False)
    ahead = foreseen(recording._asdict, watch, BUDGET)
    if ahead is watch:
        return
    # A confirmation that passes ends with the foreseen steps; a refused one would have gone on.
    steps = watch.most_steps if ahead.is_refused else len(ahead.peaks)
    try:
        end = watched(recorded(first, later, kept, steps))
    except DeviceFullError:
        assert ahead.is_refused
        return
    assert bool(end.objection()) is ahead.is_refused
    assert end.is_settled or ahead.is_refused
    assert end.peaks[: len(ahead.peaks)] == ahead.peaks


def going_round(batch: int, count: int) -> Recording:
    """Steps that keep a batch of some MiB until they have the next. The first makes states."""
    steps, old, blocks = list[list[int]](), list[int](), 0
    for step in range(count):
        states = [] if step else [350 * MIB]
        steps.append([batch * MIB, *old, 370 * MIB, ~(blocks + 1), *states])
        old, blocks = [~blocks], blocks + 2 + len(states)
    return Recording([], steps)


@pytest.mark.parametrize(("batch", "runs_out"), [(100, False), (190, True)])
def test_two_steps_show_that_the_third_runs_out_of_memory(batch: int, runs_out: bool) -> None:
    """The old batch is then where 370 MiB were free, and the next one does not fit beside it."""
    recording = going_round(batch, count=2)
    watch = watched(recording)
    ahead = foreseen(recording._asdict, watch, BUDGET)
    assert ahead.is_refused is runs_out
    assert (ahead is watch) is not runs_out
    with pytest.raises(DeviceFullError) if runs_out else nullcontext():
        watched(going_round(batch, count=3))


def test_a_group_that_accumulates_gradients_is_repeated_as_a_whole() -> None:
    """Its first backward pass releases the gradients of the group before, and makes its own."""
    gradient, output = 5 * MIB, 8 * MIB
    steps = [[output, gradient], [~1, output, ~0, gradient]]
    steps += [[output, ~2, MIB, ~5], [output, ~4, MIB, ~7]]
    steps += [[MIB, ~8, ~3, output, ~6, gradient], [output, ~9, MIB, ~12]]
    allocator = CachingAllocator()
    peaks = [peak for peak, _ in Replay(Recording([], steps), allocator).steps(30)]
    assert peaks[6:] == peaks[5:6] * 24
