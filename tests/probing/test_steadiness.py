from __future__ import annotations

import random
from statistics import NormalDist, fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.probing.steadiness import (
    CACHING_VARIED_STEPS,
    CONFIDENCE,
    WITHIN_BUDGET,
    WITHIN_MEMORY,
    PeakWatch,
    highest_to_expect,
    is_rising,
    steps_without_growth,
    tolerance_factor,
)

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
    assert highest_to_expect(peaks, 0.99) >= max(peaks)


@given(st.integers(1, 2**40), st.integers(3, 9))
def test_from_peaks_that_do_not_differ_no_more_is_to_be_expected(peak: int, steps: int) -> None:
    assert highest_to_expect([peak] * steps, 0.99) == peak


@given(peaks)
def test_more_is_to_be_expected_of_more_steps_and_the_fewer_have_been_seen(
    peaks: list[int],
) -> None:
    expected = highest_to_expect(peaks, WITHIN_BUDGET)
    assert highest_to_expect(peaks, WITHIN_MEMORY) >= expected
    assert highest_to_expect(peaks, WITHIN_BUDGET, 2 * len(peaks)) <= expected


def test_the_more_peaks_differ_the_more_is_to_be_expected() -> None:
    assert round(highest_to_expect([50, 98, 99, 100, 101, 102], 0.99)) == 109
    assert round(highest_to_expect([50, 94, 97, 100, 103, 106], 0.99)) == 127


def test_the_first_step_does_not_count_for_how_much_they_differ() -> None:
    assert highest_to_expect([10, 100, 100, 100, 100], 0.99) == 100
    assert highest_to_expect([110, 100, 100, 100, 100], 0.99) == 110


def test_peaks_that_were_read_too_low_only_show_that_no_more_was_needed() -> None:
    assert highest_to_expect([93, 93, 63, 93, 93, 63], 0.99) == 93
    usual, low = (
        highest_to_expect([93, 93, 94], 0.99),
        highest_to_expect([93, 93, 94, 63, 63], 0.99),
    )
    assert 94 < low < usual


@pytest.mark.parametrize("readings", [4, 9, 30])
@pytest.mark.parametrize("share", [WITHIN_BUDGET, WITHIN_MEMORY])
def test_the_bound_holds_as_often_as_it_says(readings: int, share: float) -> None:
    draw, trials = random.Random(readings), 2000
    held = 0
    for _ in range(trials):
        drawn = [draw.gauss(0, 1) for _ in range(readings)]
        bound = fmean(drawn) + tolerance_factor(readings, share) * stdev(drawn)
        held += bound >= NormalDist().inv_cdf(share)
    assert held / trials == pytest.approx(CONFIDENCE, abs=0.03)


def watched(peaks: list[int], budget: int) -> tuple[int, str]:
    """Return after how many steps a watch ends if these peaks come again and again, and why."""
    watch = PeakWatch(budget, least_steps=3, peaks_wander=True)
    while not watch.is_over and len(watch.peaks) < watch.most_steps:
        watch.note(peaks[len(watch.peaks) % len(peaks)])
    return len(watch.peaks), watch.objection()


def test_a_size_passes_once_it_is_sure_and_is_refused_once_it_will_not_be() -> None:
    peaks = [980, 1000, 1010, 990]
    assert watched(peaks, budget=1100) == (6, "")
    assert watched(peaks, budget=1080) == (8, "")
    steps, objection = watched(peaks, budget=1060)
    assert steps == 5
    assert objection.startswith("its peak memory differs from step to step, and would pass")


def test_where_each_new_shape_breaks_up_the_heap_later_rounds_have_others() -> None:
    wanders, caches = (
        PeakWatch(1000, least_steps=20, peaks_wander=wanders, batches_vary=True)
        for wanders in (True, False)
    )
    numbers = []
    for _ in range(16):
        numbers.append(wanders.batch_number)
        wanders.note(900)
    assert numbers == [0, 1, 2, 3, 4, 5, 6, 0, 8, 9, 10, 11, 12, 13, 0, 15]
    for _ in range(9):
        caches.note(900)
    assert caches.batch_number < CACHING_VARIED_STEPS
