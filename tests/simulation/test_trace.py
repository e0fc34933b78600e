from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.simulation.allocator import CachingAllocator
from batchfinder.simulation.replay import largest_that_fits, replay
from batchfinder.simulation.trace import (
    EMPTY_CACHE,
    NotAffineError,
    Stage,
    Storage,
    Trace,
    align,
    check_line,
    sort_deaths,
)
from batchfinder.units import MIB


def step(batch_size: int, *, slope: int = 10 * MIB, events: list[int] | None = None) -> Trace:
    """A weight, an activation that grows with the batch, and a workspace that is optional."""
    return Trace(
        batch_size,
        [Storage(30 * MIB), Storage(slope * batch_size), Storage(50 * MIB, optional=True)],
        events or [0, 1, 2, ~2, ~1],
        [(0, Stage.FORWARD)],
        [1],
    )


def test_two_traces_tell_every_size() -> None:
    trace = align(step(2), step(4))

    assert trace.sizes(7) == [30 * MIB, 70 * MIB, 50 * MIB]


def test_the_order_of_deaths_does_not_matter() -> None:
    assert sort_deaths(step(1, events=[0, 1, ~0, ~1])).events == [0, 1, ~0, ~1]
    assert sort_deaths(step(1, events=[0, 1, ~1, ~0])).events == [0, 1, ~0, ~1]
    assert sort_deaths(step(1, events=[0, ~0, EMPTY_CACHE, 1, ~1])).events == [
        0, ~0, EMPTY_CACHE, 1, ~1,
    ]  # fmt: skip


def test_steps_that_part_are_refused_by_name() -> None:
    other = step(4, events=[0, 1, ~1, 2, ~2])
    other.storages[1].module = "layer1"

    with pytest.raises(NotAffineError, match="batch sizes 2 and 4 part"):
        align(step(2), other)


def test_a_storage_that_shrinks_is_refused() -> None:
    with pytest.raises(NotAffineError, match="at batch size 2 and"):
        align(step(2), step(4, slope=2 * MIB))


def test_a_third_size_shows_whether_two_are_on_a_line() -> None:
    trace = align(*(Trace(size, [Storage((size + 16) ** 2)], [0]) for size in (4, 8)))

    with pytest.raises(NotAffineError, match="576 B at batch size 8 and 2304 B at 32"):
        check_line(trace, Trace(32, [Storage((32 + 16) ** 2)], [0]))
    check_line(align(step(2), step(4)), step(32))


def test_nothing_above_the_bound_fits() -> None:
    trace = align(step(2), step(4))

    assert trace.upper_bound(100 * MIB) == 7
    assert not replay(trace, 8, CachingAllocator(100 * MIB)).fits


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 9)), min_size=1),
    st.integers(0, 1000),
)
def test_the_bound_is_that_of_all_lines(lines: list[tuple[int, int]], capacity: int) -> None:
    """Storages that live one after the other: each is a line of its own."""
    storages = [[Storage(fixed + slope * size) for fixed, slope in lines] for size in (2, 4)]
    events = [event for i in range(len(lines)) for event in (i, ~i)]
    trace = align(*(Trace(size, s, events) for size, s in zip((2, 4), storages, strict=True)))

    bounds = [(capacity - fixed) // slope for fixed, slope in lines if slope]
    if any(fixed > capacity for fixed, _ in lines):
        bounds.append(0)
    assert trace.upper_bound(capacity) == (max(0, min(bounds)) if bounds else None)


def test_an_optional_workspace_never_makes_a_step_fail() -> None:
    trace = align(step(2), step(4))

    full = replay(trace, 7, CachingAllocator(100 * MIB))
    roomy = replay(trace, 7, CachingAllocator(200 * MIB))

    assert full.fits
    assert full.stage_peak_bytes == {Stage.FORWARD: 100 * MIB}
    assert roomy.stage_peak_bytes == {Stage.FORWARD: 150 * MIB}


@pytest.mark.parametrize("answer", [0, 1, 2, 63, 64, 97, 100])
@pytest.mark.parametrize("multiple_of", [1, 8])
@pytest.mark.parametrize("told", [1e-9, 0.3, 1.0, 30.0])
def test_the_largest_that_fits(answer: int, multiple_of: int, told: float) -> None:
    """Whatever the room is told to be, if only its sign is right."""
    tried: list[int] = []

    def room(size: int) -> float:
        tried.append(size)
        return told * (answer - size)

    found = largest_that_fits(room, 100, smallest=1, multiple_of=multiple_of)

    assert found == answer // multiple_of * multiple_of
    assert all(size % multiple_of == 0 for size in tried)
