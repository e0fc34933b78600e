from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.probing.steadiness import highest_to_expect, is_rising, steps_without_growth

peaks = st.lists(st.integers(1, 2**40), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("peaks", "noise_bytes", "steps"),
    [
        ([], 0, 0),
        ([100], 0, 0),
        ([100, 100, 100], 0, 2),
        ([100, 99, 101], 0, 0),
        ([100, 104, 104], 0, 1),
        ([100, 103, 106, 109], 3, 3),
        ([100, 103, 107, 110], 3, 1),
    ],
)
def test_steps_without_growth(peaks: list[int], noise_bytes: float, steps: int) -> None:
    assert steps_without_growth(peaks, noise_bytes) == steps


@given(peaks)
def test_a_step_that_needs_the_most_starts_the_count_anew(peaks: list[int]) -> None:
    assert steps_without_growth([*peaks, max(peaks) + 1], noise_bytes=0) == 0
    assert steps_without_growth([*peaks, max(peaks) + 1, 1], noise_bytes=0) == 1


@given(peaks, st.integers(0, 1000))
def test_a_leak_shows_as_a_rise(peaks: list[int], noise_bytes: int) -> None:
    leaking = [max(peaks) + n * (noise_bytes + 1) for n in (1, 2, 3)]
    assert is_rising([*peaks, *leaking], noise_bytes)
    assert not is_rising([*peaks, *leaking, leaking[-1] + noise_bytes], noise_bytes)


def test_too_few_steps_show_no_rise() -> None:
    assert not is_rising([100, 200, 300], noise_bytes=0)


@given(peaks)
def test_at_least_what_was_needed_is_to_be_expected(peaks: list[int]) -> None:
    assert highest_to_expect(peaks, deviations=3) >= max(peaks)


@given(st.integers(1, 2**40), st.integers(3, 9))
def test_from_peaks_that_do_not_differ_no_more_is_to_be_expected(peak: int, steps: int) -> None:
    assert highest_to_expect([peak] * steps, deviations=3) == peak


def test_the_more_peaks_differ_the_more_is_to_be_expected() -> None:
    assert highest_to_expect([50, 99, 100, 101], deviations=3) == 103
    assert highest_to_expect([50, 95, 100, 105], deviations=3) == 115
    assert highest_to_expect([50, 95, 100, 105], deviations=4) == 120


def test_the_first_step_does_not_count_for_how_much_they_differ() -> None:
    assert highest_to_expect([10, 100, 100, 100, 100], deviations=3) == 100
    assert highest_to_expect([110, 100, 100, 100, 100], deviations=3) == 110


def test_peaks_that_were_read_too_low_say_nothing() -> None:
    assert highest_to_expect([93, 93, 63, 93, 93, 63], deviations=3) == 93
