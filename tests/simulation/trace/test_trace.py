from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import curves

from batchfinder.probing.devices.allocator.caching import CachingAllocator
from batchfinder.simulation.replay import replay
from batchfinder.simulation.trace.alignment import align
from batchfinder.simulation.trace.curve import Curve
from batchfinder.simulation.trace.trace import GeneralTrace, Kind, Stage, Storage, Trace
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


def test_nothing_above_the_bound_fits() -> None:
    trace = align(step(2), step(4))

    assert trace.upper_bound(100 * MIB) == 7
    assert not replay(trace, 8, CachingAllocator(100 * MIB)).fits


@given(st.lists(curves(), min_size=1), st.integers(0, 2**40))
def test_the_bound_is_that_of_all_curves(known: list[Curve], capacity: int) -> None:
    """Storages that live one after the other: each is a curve of its own."""
    example = Trace(4, [Storage(0) for _ in known], [e for i in range(len(known)) for e in (i, ~i)])
    trace = GeneralTrace(example, [(curve,) for curve in known])

    bound = trace.upper_bound(capacity)

    if bound is None:
        assert max(trace.sizes(2**40)) == max(trace.sizes(1)) <= capacity
    else:
        assert max(trace.sizes(bound + 1)) > capacity
        assert bound == 0 or max(trace.sizes(bound)) <= capacity


@given(st.lists(st.tuples(curves(), st.booleans()), min_size=1), st.integers(0, 2**20))
def test_the_highest_is_that_of_all_alive(known: list[tuple[Curve, bool]], batch_size: int) -> None:
    """Storages that are born one after the other; after some births the oldest one dies."""
    events: list[int] = []
    alive: list[int] = []
    most = 0.0
    for index, (_, ends_one) in enumerate(known):
        events.append(index)
        alive.append(index)
        most = max(most, sum(known[i][0].bytes_at(batch_size) for i in alive))
        if ends_one:
            events.append(~alive.pop(0))
    example = Trace(4, [Storage(0) for _ in known], events)
    trace = GeneralTrace(example, [(curve,) for curve, _ in known])

    assert trace.highest_at(batch_size, list(Stage)).bytes_at(batch_size) == most


def test_what_the_activations_of_a_module_take_for_each_example() -> None:
    storages = [Storage(0, Kind.ACTIVATION, module="head"), Storage(0, Kind.INPUT)] * 2
    amounts = [(Curve(7, 10),), (Curve(0, 8),), (Curve(0, -1, 2),), (Curve(0, 8),)]
    trace = GeneralTrace(Trace(4, storages, [0, 1, 2, 3]), amounts)

    assert trace.activations_per_sample(5) == {"head": 10 - 1 + 2 * 5}

    in_turn = GeneralTrace(Trace(4, storages, [0, 1, ~0, 2, ~2, 3]), amounts)
    assert in_turn.activations_per_sample(5) == {"head": 10}


def test_an_optional_workspace_never_makes_a_step_fail() -> None:
    trace = align(step(2), step(4))

    full = replay(trace, 7, CachingAllocator(100 * MIB))
    roomy = replay(trace, 7, CachingAllocator(200 * MIB))

    assert full.fits
    assert full.stage_peak_bytes == {Stage.FORWARD: 100 * MIB}
    assert roomy.stage_peak_bytes == {Stage.FORWARD: 150 * MIB}


def training(steps: int) -> Trace:
    """A weight; of each step a batch, which lives until the next is there, and an activation.

    And a state of the optimizer, which the first step makes while the activation lies below it.
    """
    storages = [Storage(30 * MIB)]
    events, starts = [0], []
    batch = state = None
    for _ in range(steps):
        starts.append(len(events))
        for size in (40, 100) if state else (40, 100, 20):
            events.append(len(storages))
            storages.append(Storage(size * MIB))
        state = state or events[-1]
        if batch:
            events.insert(starts[-1] + 1, ~batch)
        batch = len(storages) - (2 if batch else 3)
        events.append(~(batch + 1))
    return Trace(1, storages, events, [(0, Stage.SETUP), (1, Stage.FORWARD)], starts)


def replayed(trace: Trace, capacity_mib: int) -> tuple[int, int] | None:
    general = GeneralTrace(trace, [(Curve(storage.size_bytes),) for storage in trace.storages])
    run = replay(general, 1, CachingAllocator(capacity_mib * MIB))
    return (run.peak_reserved_bytes, run.retries) if run.fits else None


@pytest.mark.parametrize("capacity_mib", range(180, 420, 20))
def test_two_steps_tell_those_that_follow(capacity_mib: int) -> None:
    traced = replayed(training(8), capacity_mib)

    assert (traced is not None) == (capacity_mib >= 260)
    assert replayed(training(2), capacity_mib) == traced


def test_a_step_that_leaves_something_else_than_it_found_is_not_repeated() -> None:
    """Two more of the same would not fit."""
    storages = [Storage(40 * MIB), Storage(40 * MIB)]
    trace = Trace(1, storages, [0, 1], [(0, Stage.FORWARD)], [0, 1])

    assert replayed(trace, 100) == (80 * MIB, 0)
