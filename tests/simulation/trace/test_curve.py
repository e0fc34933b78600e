from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st
from strategies import curves

from batchfinder.simulation.trace.curve import Curve


@given(curves(), st.integers(0, 2**24))
def test_what_one_example_more_adds(curve: Curve, size: int) -> None:
    assert curve.bytes_at(size) + curve.growth_at(size) == curve.bytes_at(size + 1)
    assert curve.bytes_at(size) == curve.fixed_bytes + size * curve.per_sample_at(size)
    assert not curve.shrinks


@given(curves(), st.integers(0, 2**40))
@example(Curve(0, -4, 4), 0)  # nothing up to one example
@example(Curve(10**9, 10**9, 1), 2**40)  # hardly bent
@example(Curve(0, 3, 1), 10**4 * (10**4 + 3))  # just as much
def test_the_largest_within_a_capacity(curve: Curve, capacity: int) -> None:
    largest = curve.largest_within(capacity)

    if math.isinf(largest):
        assert curve == Curve(curve.fixed_bytes)
        assert curve.fixed_bytes <= capacity
    else:
        assert curve.bytes_at(int(largest) + 1) > capacity
        assert curve.bytes_at(int(largest)) <= max(capacity, curve.fixed_bytes)


def test_what_shrinks() -> None:
    assert Curve(100, -1).shrinks
    assert Curve(100, 10, -1).shrinks
    assert Curve(100, -3, 2).shrinks
    assert not Curve(0, -2, 2).shrinks
