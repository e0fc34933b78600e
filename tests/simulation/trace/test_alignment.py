from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import curves

from batchfinder.simulation.trace.alignment import (
    NotGeneralError,
    NotInLineError,
    align,
    alike,
    check_lines,
    first_step,
    sort_deaths,
)
from batchfinder.simulation.trace.curve import Curve
from batchfinder.simulation.trace.trace import EMPTY_CACHE, Stage, Storage, Trace

SIZES = (4, 8, 12, 32)


def step(batch_size: int, *, slope: int = 10_000, events: list[int] | None = None) -> Trace:
    """A weight, an activation that grows with the batch, and a workspace that is optional."""
    return Trace(
        batch_size,
        [Storage(30_000), Storage(slope * batch_size), Storage(50_000, optional=True)],
        events or [0, 1, 2, ~2, ~1],
    )


def steps(*sizes_of: Callable[[int], int], optional: bool = False) -> list[Trace]:
    """The same step at a few batch sizes; each storage is of this size."""
    return [
        Trace(b, [Storage(f(b), optional=optional) for f in sizes_of], list(range(len(sizes_of))))
        for b in SIZES
    ]


def test_two_traces_tell_every_size() -> None:
    assert align(step(2), step(4)).sizes(7) == [30_000, 70_000, 50_000]


@given(st.lists(curves(), min_size=1), st.integers(0, 2**20))
def test_four_traces_tell_every_parabola(known: list[Curve], batch_size: int) -> None:
    traces = [Trace(b, [Storage(int(c.bytes_at(b))) for c in known]) for b in SIZES]

    trace = align(*traces)

    assert trace.curves == known
    assert trace.sizes(batch_size) == [curve.bytes_at(batch_size) for curve in known]


def test_pairs_of_different_examples() -> None:
    """One byte for each: only the whole is of whole bytes."""
    trace = align(*steps(lambda b: b * (b - 1) // 2))

    assert trace.sizes(333) == [333 * 332 // 2]


def test_what_is_rounded_up_stays_a_line() -> None:
    """A parabola through the first three sizes would be 24 MB too large at 10 000."""
    (size,) = align(*steps(lambda b: -(-100 * b // 512) * 512)).sizes(10_000)

    assert size == pytest.approx(100 * 10_000, rel=0.3)


@pytest.mark.parametrize(
    "size",
    [
        lambda b: -(-b // 8) * 8 * 1000,
        lambda b: (1 << (b - 1).bit_length()) * 1000,
        lambda b: max(b, 10) * 1000,
        lambda b: min(b, 10) * 1000,
        lambda b: min(b, 20) * 1000,
        lambda b: max(b * b, 20 * b) * 4,
        lambda b: (-(-b // 8) * 8) ** 2,
        lambda b: b**3,
        lambda b: 10_000 - 10 * b,
        lambda b: 10_000 + 100 * b - b * b,
        lambda b: b * b - 50 * b + 10_000,
        lambda b: b * b + 100 * b - 600,
    ],
)
def test_what_is_no_parabola_or_shrinks_is_refused(size: Callable[[int], int]) -> None:
    with pytest.raises(NotInLineError, match=rf"{size(4)} B at batch size 4, .* at 12 and .* 32,"):
        align(*steps(size))


def test_an_optional_workspace_need_not_be_told() -> None:
    trace = align(*steps(lambda b: max(b, 10) * 1000, optional=True))

    assert trace.sizes(7) == [10_000]


def test_the_order_of_deaths_does_not_matter() -> None:
    assert sort_deaths(step(1, events=[0, 1, ~0, ~1])).events == [0, 1, ~0, ~1]
    assert sort_deaths(step(1, events=[0, 1, ~1, ~0])).events == [0, 1, ~0, ~1]
    assert sort_deaths(step(1, events=[0, ~0, EMPTY_CACHE, 1, ~1])).events == [
        0, ~0, EMPTY_CACHE, 1, ~1,
    ]  # fmt: skip


def test_steps_that_part_are_refused_by_name() -> None:
    other = step(12, events=[0, 1, ~1, 2, ~2])
    other.storages[1].module = "layer1"

    with pytest.raises(NotGeneralError, match="batch sizes 2 and 12 part") as refusal:
        align(step(2), step(4), other)
    assert not isinstance(refusal.value, NotInLineError)


def test_a_storage_that_shrinks_is_refused() -> None:
    with pytest.raises(NotInLineError, match="at batch size 2 and"):
        align(step(2), step(4, slope=2_000))


def test_a_third_size_shows_whether_two_are_on_a_line() -> None:
    trace = align(*(Trace(size, [Storage((size + 16) ** 2)], [0]) for size in (4, 8)))

    with pytest.raises(NotInLineError, match="576 B at batch size 8 and 2304 B at 32"):
        check_lines(trace, Trace(32, [Storage((32 + 16) ** 2)], [0]))
    check_lines(align(step(2), step(4)), step(32))


def two_steps(batch_size: int, *, states: int = 0, cached: int = 0) -> Trace:
    """Two steps with one activation each; the first makes optimizer states and fills a cache."""
    weight = Storage(30_000)
    first = Storage(10 * batch_size, stage=Stage.FORWARD, line="model.py:1")
    cache = Storage(cached * batch_size, stage=Stage.FORWARD, line="model.py:2")
    state = Storage(states, stage=Stage.OPTIMIZER)
    second = Storage(10 * batch_size, stage=Stage.FORWARD, line="model.py:1")
    events = [0, 1, 2, ~1, 3, 4, ~4]
    return Trace(batch_size, [weight, first, cache, state, second], events, steps=[1, 5])


def test_a_step_tells_more_steps_and_those_with_another_optimizer() -> None:
    one = align(*(first_step(two_steps(size, states=8)) for size in (4, 8)))
    assert one.sizes(100) == [30_000, 1000, 0, 8]
    both = alike(one, two_steps(8, states=8))
    assert both.sizes(100) == align(*(two_steps(size, states=8) for size in (4, 8))).sizes(100)
    assert alike(both, two_steps(8, states=500)).sizes(100)[3:] == [500, 1000]


def test_steps_that_allocate_something_else_are_no_longer_told() -> None:
    one = align(*(first_step(two_steps(size)) for size in (4, 8)))
    with pytest.raises(NotGeneralError, match=r"differ \(model\.py:2\)"):
        alike(one, two_steps(8, cached=3))
    with pytest.raises(NotGeneralError):
        alike(one, two_steps(16))


def two_passes(batch_size: int, *, constants: int = 1) -> Trace:
    """Two steps; at size 8, a weight's gradient is as large as an activation of the same line."""
    activation = Storage(10 * batch_size, stage=Stage.BACKWARD, line="model.py:1")
    gradient = Storage(80, stage=Stage.BACKWARD, line="model.py:1")
    storages = [activation, gradient, activation, *[gradient] * constants]
    return Trace(batch_size, storages, [*range(len(storages))], steps=[0, 2])


def test_storages_that_are_as_large_by_chance_keep_their_order() -> None:
    one = align(*(first_step(two_passes(size)) for size in (4, 8)))
    assert alike(one, two_passes(8)).sizes(100) == [1000, 80, 1000, 80]
    with pytest.raises(NotGeneralError, match=r"differ \(model\.py:1\)"):
        alike(one, two_passes(8, constants=2))
