"""The simulated search finds the largest size in few tries, and looks beyond a failure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.simulation.largest import largest_that_fits


@pytest.mark.parametrize("answer", [0, 1, 2, 63, 64, 97, 100])
@pytest.mark.parametrize("multiple_of", [1, 8])
@pytest.mark.parametrize("told", [1e-9, 0.3, 1.0, 30.0])
def test_the_largest_that_fits(answer: int, multiple_of: int, told: float) -> None:
    """Only the sign of the reported room has to be right."""
    tried: list[int] = []

    def room(size: int) -> float:
        tried.append(size)
        return told * (answer - size)

    found = largest_that_fits(room, 100, smallest=1, multiple_of=multiple_of)

    assert found == answer // multiple_of * multiple_of
    assert all(size % multiple_of == 0 for size in tried)


@pytest.mark.parametrize(
    ("fitting", "answer"),
    [
        ({126, 128}, 128),
        ({126, 128, 129, 130}, 130),
        ({126, 128, 129, 136}, 136),
        ({126, 127, 130}, 127),  # no round one fits
    ],
)
def test_multiples_of_8_above_a_failure_are_tried(fitting: set[int], answer: int) -> None:
    tried: list[int] = []

    def room(size: int) -> float:
        tried.append(size)
        return 1.0 if size < 126 or size in fitting else -1.0

    assert largest_that_fits(room, 140) == answer
    assert answer + 1 in tried
    assert len(tried) == len(set(tried))


@given(
    fits=st.lists(st.booleans(), min_size=1, max_size=80),
    multiple_of=st.integers(1, 12),
    told=st.floats(1e-6, 50),
)
def test_the_size_found_fits_and_the_next_does_not(
    fits: list[bool], multiple_of: int, told: float
) -> None:
    """This holds however fitting and failing sizes are mixed."""
    tried: list[int] = []

    def room(size: int) -> float:
        tried.append(size)
        return told if fits[size - 1] else -told

    found = largest_that_fits(room, len(fits), multiple_of=multiple_of)

    assert len(tried) == len(set(tried))
    assert found % multiple_of == 0
    if found:
        assert found in tried
        assert fits[found - 1]
    following = found + multiple_of
    if following <= len(fits):
        assert following in tried
        assert not fits[following - 1]
