"""Memory over batch size and example size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.studies.scaling import Scaling


def known(a: float, b: float, *sizes: float) -> Scaling:
    scaling = Scaling()
    for x in sizes:
        scaling.learn(x, fixed_bytes=1000, per_sample_bytes=a * x + b * x * x)
    return scaling


@given(
    st.floats(1, 100),
    st.floats(0, 1),
    st.lists(st.floats(1, 1000), min_size=2, max_size=5, unique_by=round),
    st.floats(0, 1),
)
def test_two_sizes_tell_what_is_linear_and_what_is_square(
    a: float, b: float, sizes: list[float], share: float
) -> None:
    x = min(sizes) + share * (max(sizes) - min(sizes))
    assert known(a, b, *sizes).per_sample_at(x) == pytest.approx(a * x + b * x * x, rel=1e-6)


def test_one_size_alone_is_taken_as_proportional() -> None:
    scaling = known(10, 0, 4)
    assert scaling.per_sample_at(8) == 80
    assert scaling.batch_size_at(8, 1800) == 10


def test_a_reading_tells_a_slope_and_names_can_change() -> None:
    scaling = known(10, 0, 4)
    scaling.learn_reading(8, 10, 2600)
    scaling.rename({4: 1, 8: 2})
    assert scaling.per_sample_bytes == {1: 40, 2: 160}
    scaling.learn_reading(2, 10, 500)  # below what is fixed: tells nothing
    assert scaling.per_sample_bytes[2] == 160
