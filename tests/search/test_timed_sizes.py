"""Which sizes are timed, once the largest is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.throughput import Throughput
from batchfinder.search.bounds import ALL_SIZES, Bounds
from batchfinder.search.timed_sizes import measure_throughput


def probe_of(size: int, floor: float, steps: int = 3) -> Probe:
    seconds = (9.0, *[floor + size / 1000] * (steps - 1))  # the first step chooses kernels
    return Probe(
        size, Outcome.FITS, steps, sum(seconds), size * steps, confirmed=True, steps_seconds=seconds
    )


def measured(
    floor: float, answer: int = 1000, drift: float = 0, bounds: Bounds = ALL_SIZES
) -> tuple[Throughput, list[int]]:
    """Time sizes on a machine that becomes slower by ``drift`` with each of them."""
    sizes: list[int] = []

    def run(size: int) -> Probe:
        sizes.append(size)
        slow = (1 + drift) ** len(sizes)
        probe = probe_of(size, floor)
        return replace(probe, steps_seconds=tuple(slow * one for one in probe.steps_seconds))

    search = [Probe(answer + 1, Outcome.OOM, 4, 1.0, 4 * answer), probe_of(answer, floor)]
    throughput = measure_throughput(run, search, answer, bounds)
    assert throughput is not None
    assert sum(3 * size for size in sizes) <= 7 * answer  # what the search cost
    return throughput, sizes


def test_sizes_are_halved_until_training_is_slower() -> None:
    throughput, sizes = measured(floor=0.05)
    assert sizes[:3] == [500, 250, 125]
    assert throughput.knee == 707  # between 500, which is 5 % slower, and 1000
    assert measured(floor=0.005)[0].knee < 500


def test_where_small_sizes_are_slow_few_are_timed() -> None:
    throughput, sizes = measured(floor=5.0)
    assert sizes[0] == 500
    assert len({*sizes}) <= 2
    assert throughput.knee == 1000


@pytest.mark.parametrize("bounds", [Bounds.of(multiple_of=64), Bounds.of(300)])
def test_only_sizes_that_may_be_tried_are_timed(bounds: Bounds) -> None:
    _, sizes = measured(floor=0.0, answer=960, bounds=bounds)
    assert all(n in range(bounds.first, 961, bounds.multiple_of) for n in sizes)
    first = sizes[: len({*sizes})]
    assert sizes[len(first) : 2 * len(first)] == sorted(first)  # up again, and down


@pytest.mark.parametrize("drift", [0.02, 0.05, -0.03])
def test_a_machine_that_becomes_slower_or_faster_tells_no_knee(drift: float) -> None:
    assert measured(floor=0.05)[0].is_clear
    throughput, sizes = measured(floor=0.05, drift=drift)
    assert len({*sizes}) < len(sizes)  # the same size twice tells the drift
    assert not throughput.is_clear
    assert throughput.knee_from <= 707 <= throughput.knee_to


def test_a_load_that_comes_and_goes_between_rounds_hides_no_knee() -> None:
    runs: list[int] = []

    def run(size: int) -> Probe:
        runs.append(size)
        load = 1 + (len(runs) // 5) % 3 * 0.3
        return Probe(size, Outcome.FITS, 1, 1.0, size, steps_seconds=(load * (0.05 + size / 1000),))

    throughput = measure_throughput(run, [probe_of(1000, 0.05, steps=20)], 1000)
    assert throughput is not None
    assert (throughput.knee, throughput.is_clear) == (707, True)
    assert min(rate.rounds for rate in throughput.rates) >= 4


def test_timing_ends_with_the_time_limit() -> None:
    left = iter([30.0, 20.0, 5.0, 4.0, 3.0, 2.0])
    sizes: list[int] = []

    def run(size: int) -> Probe:
        sizes.append(size)
        return probe_of(size, 0.005)

    search = [probe_of(1000, 0.005, steps=6)]
    measure_throughput(run, search, 1000, seconds_left=lambda: next(left))
    assert sizes == [500, 250]


def test_without_a_reading_at_the_answer_there_is_nothing_to_compare() -> None:
    probe = Probe(8, Outcome.FITS, 1, 1.0, confirmed=True)
    assert measure_throughput(lambda *_: probe, [probe], 8) is None


def test_a_drift_counts_also_where_only_two_sizes_were_timed() -> None:
    throughput, sizes = measured(floor=0.1, drift=0.2, bounds=Bounds.of(500))
    assert {*sizes} == {500, 707}
    assert not throughput.is_clear
