from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest
from fakes import AdversarialProber, FakeProber
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import Curve, fake_probers, search_bounds, thoroughly

from batchfinder.errors import UsageError
from batchfinder.probing.place import VARIED_PRICES
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.result import Status
from batchfinder.search.belief import APART, line
from batchfinder.search.bounds import ALL_SIZES, UNLIMITED_BATCH_SIZE, Bounds
from batchfinder.search.conclusion import stopped_early
from batchfinder.search.head_start import Guess
from batchfinder.search.prober import Prober
from batchfinder.search.search import Finding, search
from batchfinder.units import GIB, MIB


def run_search(
    prober: Prober,
    bounds: Bounds = ALL_SIZES,
    guess: Guess | Callable[[list[Probe]], Guess] | None = None,
    replays: bool = False,
) -> tuple[Finding, list[Probe]]:
    probes: list[Probe] = []

    def guessed(_: Probe | None) -> Guess | None:
        return guess(probes) if callable(guess) else guess

    def run(batch_size: int, confirm: bool) -> Probe:
        probes.append(prober.probe(batch_size, confirm=confirm))
        return probes[-1]

    finding = search(
        run,
        budget_bytes=prober.budget_bytes,
        bounds=bounds,
        is_repeatable=prober.is_repeatable,
        guess=None if guess is None else guessed,
        replays=replays,
    )
    return finding, probes


def exact_device(maximum: int, fixed_share: float = 0.3) -> FakeProber:
    """Fits exactly the sizes up to ``maximum``, and reads what it needs."""
    return FakeProber(
        budget_bytes=2 * GIB,
        fixed_bytes=fixed_share * 2 * GIB,
        bytes_per_sample=(1 - fixed_share) * 2 * GIB / (maximum + 0.5),
    )


def story(probes: list[Probe]) -> list[str]:
    """Each size with ``+`` or ``-``, and ``!`` for a confirmation."""
    return [f"{p.batch_size}{'+' if p.fits else '-'}{'!' if p.confirmed else ''}" for p in probes]


def size_of(finding: Finding) -> int:
    return finding.answer.batch_size if finding.answer else 0


def halvings(bounds: Bounds) -> int:
    """How many probes bisection needs for the sizes within the bounds."""
    return math.ceil(math.log2(bounds.steps_between(bounds.first, bounds.last) + 1))


def was_refuted(prober: FakeProber, probes: list[Probe]) -> bool:
    """Whether a confirmation failed where a probe had fitted, or after its first step.

    Where verdicts do not repeat, any confirmation that fails has the same effect.
    """
    if not prober.is_repeatable:
        return any(p.confirmed and not p.fits for p in probes)
    plain = {p.batch_size for p in probes if p.fits and not p.confirmed}
    failures = [p for p in probes if p.confirmed and not p.fits]
    return any(p.batch_size in plain or p.steps > 1 for p in failures)


guesses = st.none() | st.builds(Guess, st.integers(1, 10**7), st.booleans(), st.floats(0.001, 0.2))


# Every device, whatever it does.


MISLEADING = AdversarialProber(GIB, 10, 100, 0, seed=461047, fit_share=0.9375)
FRAGMENTED = FakeProber(GIB, GIB / 400_000, 0.75 * GIB, reserved_extra=0.15)
SILENT = AdversarialProber(seed=98, fit_share=0.9, has_readings=False, is_repeatable=False)


@thoroughly
@given(fake_probers(), search_bounds(), guesses, st.booleans())
@example(MISLEADING, Bounds.of(59), None, False)  # its readings mislead
@example(SILENT, ALL_SIZES, Guess(98, False), False)  # it crept on above a guess that was passed
@example(FRAGMENTED, ALL_SIZES, Guess(129, False, 0.125), True)  # it halved down to just above low
def test_a_search_keeps_its_promises(
    prober: FakeProber, bounds: Bounds, guess: Guess | None, replays: bool
) -> None:
    finding, probes = run_search(prober, bounds, guess, replays)
    the_answer_was_confirmed_and_the_size_above_it_failed(finding, probes, prober, bounds)
    no_size_was_run_twice_or_out_of_bounds(probes, bounds)
    the_search_ended_within_its_bound(probes, prober, bounds)


def the_answer_was_confirmed_and_the_size_above_it_failed(
    finding: Finding, probes: list[Probe], prober: FakeProber, bounds: Bounds
) -> None:
    first, last = bounds.first, bounds.last
    failed = [p.batch_size for p in probes if not p.fits]
    answer = size_of(finding)
    if finding.status is Status.NOTHING_FITS:
        assert finding.answer is None
        assert any(p.batch_size == first and p.confirmed and not p.fits for p in probes)
        return
    if first in failed:  # it was tried again, and only the second time it ran
        failed.remove(first)
    assert finding.answer in [p for p in probes if p.fits and p.confirmed]
    if finding.status is Status.CAPPED:
        assert (answer, failed, finding.failure) == (last, [], None)
    else:
        assert finding.status is Status.FOUND
        assert finding.failure is not None
        assert finding.failure.batch_size == min(failed)
        resolution = 0 if prober.is_repeatable else min(failed) // 20
        lies_by_chance = prober.reserved_extra or was_refuted(prober, probes)
        if finding.failure.is_thrashing or lies_by_chance:
            resolution = max(resolution, min(failed) // 100)
        assert answer < min(failed) <= max(bounds.after(answer), answer + resolution)


def no_size_was_run_twice_or_out_of_bounds(probes: list[Probe], bounds: Bounds) -> None:
    tried = [(p.batch_size, p.confirmed) for p in probes]
    assert len(tried) == len(set(tried))
    assert all(bounds.first <= size <= bounds.last for size, _ in tried)
    assert all(size == bounds.at_most(size) for size, _ in tried)


def the_search_ended_within_its_bound(
    probes: list[Probe], prober: FakeProber, bounds: Bounds
) -> None:
    allowed = halvings(bounds) + 8
    if was_refuted(prober, probes):
        # The search started over, with confirmations.
        allowed *= 2
    if bounds.is_open:
        # Growing 16-fold to the end, as nothing else tells where it is.
        allowed += math.ceil(math.log(UNLIMITED_BATCH_SIZE, 16))
    assert len(probes) <= allowed


@thoroughly
@given(fake_probers(), search_bounds())
def test_without_a_maximum_sizes_grow_from_those_that_ran(
    prober: FakeProber, bounds: Bounds
) -> None:
    _, probes = run_search(prober, Bounds.of(bounds.first, None, bounds.multiple_of))
    largest_fit = probes[0].batch_size
    for probe in probes:
        assert probe.batch_size <= 1024 * largest_fit
        if probe.fits:
            largest_fit = max(largest_fit, probe.batch_size)


@given(st.integers(0, 10**7), search_bounds(), st.sampled_from([None, 0, GIB // 2, 2 * GIB]))
def test_a_model_that_says_nothing_costs_eight_probes_more_than_bisection(
    maximum: int, bounds: Bounds, constant_peak: int | None
) -> None:
    if bounds.is_open:
        bounds = Bounds.of(bounds.first, 10**6, bounds.multiple_of)
    peaks: Mapping[Phase, int] = (
        {} if constant_peak is None else {Phase.FORWARD_BACKWARD: constant_peak}
    )
    sizes = []

    def run(batch_size: int, confirm: bool) -> Probe:
        sizes.append(batch_size)
        outcome = Outcome.FITS if batch_size <= maximum else Outcome.OOM
        return Probe(batch_size, outcome, steps=1, seconds=0, phase_peak_bytes=peaks)

    finding = search(run, budget_bytes=GIB, bounds=bounds)
    fitting = bounds.at_most(min(maximum, bounds.last))
    assert size_of(finding) == (fitting if fitting >= bounds.first else 0)
    assert len(sizes) <= halvings(bounds) + 8


def test_where_readings_show_no_growth_sizes_grow_sixteenfold() -> None:
    prober = FakeProber(bytes_per_sample=0, faults={5120: Outcome.OOM})
    _, probes = run_search(prober)
    assert story(probes)[:4] == ["1+", "20+", "320+", "5120-"]


@given(st.integers(1, 10**6), st.floats(0, 0.9), st.sampled_from([1, 8]))
def test_an_exact_device_gives_the_exact_maximum(
    maximum: int, fixed_share: float, unit: int
) -> None:
    finding, _ = run_search(exact_device(maximum, fixed_share), Bounds.of(multiple_of=unit))
    assert size_of(finding) == maximum // unit * unit


# What a search costs.


def test_an_exact_device_takes_six_probes_at_most_in_the_median() -> None:
    maxima = [round(10 ** (1 + 5 * i / 200)) for i in range(0, 201, 5)]
    counts = [
        len(run_search(exact_device(maximum, fixed_share))[1])
        for maximum in maxima
        for fixed_share in (0.05, 0.3, 0.6)
    ]
    assert median(counts) <= 6
    assert max(counts) <= 7


def test_an_exact_device_takes_six_full_size_steps_at_most_in_the_median() -> None:
    costs = []
    for i in range(0, 201, 5):
        maximum = round(10 ** (1 + 5 * i / 200))
        _, probes = run_search(exact_device(maximum))
        costs.append(sum(p.samples for p in probes) / maximum)
    assert median(costs) <= 6


@pytest.mark.parametrize("floor_share", [0.5, 0.9, 1])
def test_a_large_optimizer_step_hides_nothing(floor_share: float) -> None:
    prober = exact_device(1000)
    prober.optimizer_bytes = floor_share * prober.budget_bytes
    finding, probes = run_search(prober)
    assert size_of(finding) == 1000
    assert len(probes) <= 6


def test_rounding_to_allocator_segments_costs_little() -> None:
    prober = exact_device(1000)
    prober.curve = Curve(prober.fixed_bytes, prober.bytes_per_sample, step_bytes=2 * MIB)
    finding, probes = run_search(prober)
    answer = size_of(finding)
    assert prober.fits(answer)
    assert not prober.fits(answer + 1)
    assert len(probes) <= 7


# Where the allocator holds more than the tensors, and flushes its cache near the limit.


def fragmented_device(maximum: int, reserved_extra: float = 0.15) -> FakeProber:
    prober = exact_device(maximum)
    prober.reserved_extra, prober.thrashing = reserved_extra, 0.02
    return prober


def test_where_the_allocator_is_fragmented_the_failure_is_within_one_percent() -> None:
    prober = fragmented_device(1000)
    prober.thrashing = 0
    finding, _ = run_search(prober)
    assert finding.failure is not None
    assert finding.failure.batch_size - size_of(finding) <= 10
    assert size_of(finding) <= 1000 < finding.failure.batch_size


def test_a_fragmented_device_costs_little_more_than_an_exact_one() -> None:
    costs = []
    for seed in range(0, 200, 5):
        maximum = round(10 ** (1.5 + 3.5 * seed / 200))
        prober = fragmented_device(maximum, reserved_extra=0.02 + 0.002 * (seed % 50))
        prober.thrashing, prober.seed = 0.01 + 0.002 * (seed % 11), seed
        finding, probes = run_search(prober)
        costs.append(sum(p.samples for p in probes) / size_of(finding))
    assert median(costs) <= 9


@pytest.mark.parametrize("largest", [None, 28_500])
def test_a_maximum_far_above_a_fragmented_answer_costs_next_to_nothing(
    largest: int | None,
) -> None:
    prober = exact_device(570, fixed_share=0.2)
    prober.reserved_extra, prober.thrashing, prober.thrashing_odds = 0.15, 0.03, 0.3
    finding, probes = run_search(prober, Bounds.of(largest=largest))
    assert sum(p.samples for p in probes) / size_of(finding) <= 15


# Confirmations.


def test_a_failure_that_is_not_memory_bounds_the_answer_too() -> None:
    prober = exact_device(1000)
    prober.faults = dict.fromkeys(range(800, 1100), Outcome.FAILED)
    finding, _ = run_search(prober)
    assert size_of(finding) == 799
    assert finding.failure is not None
    assert finding.failure.outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("limit", "multiple_of", "answer"),
    [(8, 1, 8), (15, 1, 8), (21, 1, 16), (300, 1, 256), (300, 3, 192)],
)
def test_code_that_takes_only_powers_of_two_gets_the_largest_that_runs(
    limit: int, multiple_of: int, answer: int
) -> None:
    """As where it asserts that the batch size divides a global batch size."""
    prober = exact_device(limit)
    powers = {multiple_of * 2**power for power in range(10)}
    prober.faults = dict.fromkeys({*range(1000)} - powers, Outcome.FAILED)
    finding, probes = run_search(prober, Bounds.of(multiple_of=multiple_of))
    assert (size_of(finding), finding.failure and finding.failure.batch_size) == (
        answer,
        2 * answer,
    )
    assert sum(probe.outcome is Outcome.FAILED for probe in probes) <= 2
    assert stopped_early(probes, Status.INTERRUPTED).answer == finding.answer


def test_a_chance_failure_at_the_smallest_size_ends_nothing() -> None:
    prober = exact_device(1000)
    prober.chance_failures = {1}
    finding, probes = run_search(prober)
    assert size_of(finding) == 1000
    assert story(probes)[:2] == ["1-", "1+!"]


def test_what_a_probe_raises_ends_the_search() -> None:
    prober = exact_device(1000)
    prober.faults = {1: RuntimeError("shapes do not match")}
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run_search(prober)
    assert prober.sizes == [1]


# Where the same size may need more from run to run.


def unrepeatable_device(maximum: int) -> FakeProber:
    prober = exact_device(maximum)
    prober.is_repeatable = False
    return prober


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03])
def test_noise_moves_the_answer_by_little(noise: float) -> None:
    for seed in range(0, 200, 5):
        maximum = round(10 ** (1.5 + 3.5 * seed / 200))
        prober = unrepeatable_device(maximum)
        prober.noise, prober.seed = noise, seed
        finding, probes = run_search(prober)
        assert 0.85 * maximum <= size_of(finding) <= 1.15 * maximum
        assert len(probes) <= 20


# Bounds.


def test_the_largest_size_asked_for_is_confirmed_and_nothing_above_it_tried() -> None:
    finding, probes = run_search(exact_device(1000), Bounds.of(largest=700))
    assert (finding.status, size_of(finding), finding.failure) == (Status.CAPPED, 700, None)
    assert story(probes)[-1] == "700+!"
    assert len(probes) <= 4


@pytest.mark.parametrize(
    ("fixed", "per_sample", "budget", "largest"),
    [
        (12_000_000, 100, 22_000_000, 10_000),
        (5_000_000, 100, 22_000_000, 50_000),
        (19_000_000, 20, 22_000_000, 60_000),
    ],
)
def test_a_largest_size_far_below_what_fits_is_soon_confirmed_however_large_the_model(
    fixed: int, per_sample: int, budget: int, largest: int
) -> None:
    prober = FakeProber(budget_bytes=budget, fixed_bytes=fixed, bytes_per_sample=per_sample)
    finding, probes = run_search(prober, Bounds.of(largest=largest))
    assert (finding.status, size_of(finding)) == (Status.CAPPED, largest)
    assert len(probes) <= 5


def test_a_single_size_is_confirmed_at_once() -> None:
    finding, probes = run_search(exact_device(1000), Bounds.of(7, 7))
    assert story(probes) == ["7+!"]
    assert finding.status is Status.CAPPED


def test_nothing_fits() -> None:
    finding, probes = run_search(exact_device(7), Bounds.of(8))
    assert story(probes) == ["8-", "8-!"]
    assert finding == Finding(Status.NOTHING_FITS, None, probes[1])


def test_only_multiples_are_tried() -> None:
    finding, probes = run_search(exact_device(1000), Bounds.of(multiple_of=64))
    assert size_of(finding) == 960
    assert all(probe.batch_size % 64 == 0 for probe in probes)
    assert len(probes) == 5


def test_where_nothing_runs_out_the_search_ends_all_the_same() -> None:
    finding, probes = run_search(AdversarialProber(fit_share=1, has_readings=False))
    assert (finding.status, size_of(finding)) == (Status.CAPPED, UNLIMITED_BATCH_SIZE)
    assert story(probes) == ["1+", "64+", "1024+", "16384+", "262144+", "4194304+", "16777216+!"]


@pytest.mark.parametrize(
    ("bounds", "sizes"),
    [
        ((1, None, 1), (1, UNLIMITED_BATCH_SIZE)),
        ((5, 30, 8), (8, 24)),
        ((8, 8, 8), (8, 8)),
        ((1, 100, 3), (3, 99)),
        ((np.int64(1), np.int32(100), np.uint8(3)), (3, 99)),
    ],
)
def test_bounds_become_multiples(bounds: Any, sizes: tuple[int, int]) -> None:
    assert Bounds.of(*bounds)[:2] == sizes


@pytest.mark.parametrize(
    ("bounds", "sizes"),
    [
        ((1, None, 1, 96), [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]),
        ((5, 40, 1, 96), [6, 8, 12, 16, 24, 32]),
        ((1, 1000, 8, 96), [8, 16, 24, 32, 48, 96]),
        ((7, 7, 1, 7), [7]),
    ],
)
def test_sizes_divide_the_global_batch_size(bounds: Any, sizes: list[int]) -> None:
    allowed = Bounds.of(*bounds)
    assert (allowed.first, allowed.last, allowed.is_open) == (sizes[0], sizes[-1], False)
    assert [allowed.after(size) for size in sizes[:-1]] == sizes[1:]
    assert [allowed.before(size) for size in sizes[1:]] == sizes[:-1]
    assert allowed.steps_between(sizes[0], sizes[-1]) == len(sizes) - 1
    assert allowed.after(sizes[-1]) > sizes[-1]
    assert allowed.at_most(sizes[-1] + 0.5) == sizes[-1]


def test_a_search_tries_only_sizes_that_divide_the_global_batch_size() -> None:
    finding, probes = run_search(exact_device(21), Bounds.of(global_batch_size=64))
    assert (size_of(finding), finding.failure and finding.failure.batch_size) == (16, 32)
    assert len(probes) <= 5


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((0, None, 1), "the minimum batch size must be at least 1, not 0"),
        ((1, -3, 1), "the maximum batch size must be at least 1, not -3"),
        ((1, None, 0), "multiple_of must be at least 1, not 0"),
        ((1, 2.5, 1), r"the maximum batch size must be a whole number, not 2\.5"),
        (("2", None, 1), "the minimum batch size must be a whole number, not '2'"),
        ((1, None, True), "multiple_of must be a whole number, not True"),
        ((9, 8, 1), "the smallest batch size, 9, is above the largest, 8"),
        ((1, 7, 8), "no multiple of 8 lies between the smallest batch size 1 and the largest 7"),
        ((4, 6, 1, 21), "no divisor of 21 lies between the smallest batch size 4 and"),
        ((1, None, 8, 12), "no divisor of 12 that is a multiple of 8 lies between"),
        ((1, None, 1, 0), "the global batch size must be at least 1, not 0"),
    ],
)
def test_bounds_without_a_size_are_a_usage_error(bounds: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Bounds.of(*bounds)


def test_the_first_large_probe_confirms_the_guess() -> None:
    prober = exact_device(990)

    finding, probes = run_search(prober, guess=Guess(985))

    assert story(probes)[:3] == ["1+", "6+", "985+!"]
    assert len(probes) <= 7
    assert size_of(finding) == 990


@pytest.mark.parametrize("guess", [1, 3, 1100, 5000])
def test_a_guess_however_wrong_changes_no_answer(guess: int) -> None:
    finding, probes = run_search(exact_device(990), guess=Guess(guess))

    assert size_of(finding) == 990
    assert len(probes) <= 8


@pytest.mark.parametrize("answer", [905, 990, 1700])
def test_guesses_that_never_exceed_what_ran_are_left_behind(answer: int) -> None:
    """The allocator may have room for more than replays of smaller sizes show."""

    def guess(probes: list[Probe]) -> Guess:
        return Guess(max([900, *(probe.batch_size for probe in probes)]))

    finding, probes = run_search(exact_device(answer), guess=guess, replays=True)

    assert size_of(finding) == answer
    assert sum(probe.samples for probe in probes) <= 25 * answer


def test_such_guesses_are_left_behind_after_a_failure_too() -> None:
    """Memory may grow with the cube of the batch, where replays expect no more than squares."""

    def guess(probes: list[Probe]) -> Guess:
        fits = [probe.batch_size for probe in probes if probe.fits]
        return Guess(1200 if len(fits) == len(probes) else max(fits))

    prober = exact_device(822)
    prober.curve = lambda size: prober.budget_bytes * (0.1 + 0.9 * (size / 822.5) ** 3)
    finding, probes = run_search(prober, guess=guess, replays=True)

    assert size_of(finding) == 822
    assert sum(probe.samples for probe in probes) <= 15 * 822


@pytest.mark.parametrize("answer", [332, 1300, 100_000])
def test_a_guess_that_learns_nothing_from_a_larger_size_is_left_for_the_line(answer: int) -> None:
    """As where the steps of larger sizes make too many requests to be recorded."""
    finding, probes = run_search(exact_device(answer), guess=Guess(291), replays=True)

    assert size_of(finding) == answer
    assert sum(probe.samples for probe in probes) <= 10 * answer


@pytest.mark.parametrize("answer", [40, 100, 340, 5000])
def test_the_sizes_recorded_for_a_guess_are_far_enough_apart(answer: int) -> None:
    """Where a validation hides the steps of small sizes, the first size recorded is large."""
    recorded: list[int] = []

    def guess(_: Probe | None) -> Guess | None:
        is_known = any(size <= APART * recorded[-1] for size in recorded)
        return Guess(answer) if is_known else None

    def run(size: int, confirm: bool) -> Probe:
        recorded.extend([size] * confirm)
        fits = Outcome.FITS if size <= answer * (1 if confirm else 1.25) else Outcome.OOM
        peaks = {Phase.FORWARD_BACKWARD: 100 + round(size * 800 / answer), Phase.VALIDATION: 1000}
        return Probe(size, fits, 3 if confirm else 1, 0.0, phase_peak_bytes=peaks)

    found = search(run, budget_bytes=1150, guess=guess, replays=True)
    assert found.answer is not None
    assert found.answer.batch_size == answer
    assert len(recorded) == 4  # two small sizes, the guess, and the size above it


@pytest.mark.parametrize("error", [-0.08, -0.02, 0.03, 0.09])
@pytest.mark.parametrize("answer", [52, 148, 1000])
def test_where_batches_vary_a_search_goes_by_guesses_after_failures_too(
    answer: int, error: float
) -> None:
    """One step runs up to 1.25 times the answer. A confirmation does not, and corrects a guess."""
    moves: list[tuple[int, bool]] = []

    def guess(_: Probe | None) -> Guess | None:
        seen = max((size for size, confirmed in moves if confirmed), default=0)
        near = max(0, 1 - seen / answer)
        return Guess(round(answer * (1 + error * near)), deviation=0.04) if seen else None

    def run(size: int, confirm: bool) -> Probe:
        moves.append((size, confirm))
        fits = Outcome.FITS if size <= answer * (1 if confirm else 1.25) else Outcome.OOM
        peak = {Phase.FORWARD_BACKWARD: 100 + round(size * 800 / answer)}
        return Probe(size, fits, 6 if confirm else 1, 0.0, phase_peak_bytes=peak, confirmed=confirm)

    found = search(run, budget_bytes=1150, guess=guess, replays=True, prices=VARIED_PRICES)
    assert found.answer is not None
    assert 0.95 * answer <= found.answer.batch_size <= answer
    large = [confirmed for size, confirmed in moves if size > answer / 2]
    assert all(large)
    assert len(large) <= 4


@pytest.mark.parametrize("answer", [110, 400, 799, 980])
def test_where_failures_are_not_of_memory_a_guess_does_not_creep_down_from_them(
    answer: int,
) -> None:
    """As where a script fails once the batch is larger than its smallest data set."""
    prober = exact_device(1000)
    prober.faults = dict.fromkeys(range(answer + 1, 1001), Outcome.FAILED)

    def guess(probes: list[Probe]) -> Guess:
        return Guess(min([1000, *(each.batch_size - 1 for each in probes if not each.fits)]))

    finding, probes = run_search(prober, guess=guess, replays=True)

    assert size_of(finding) == answer
    assert len(probes) <= 20


def test_a_guess_that_learned_from_a_failure_is_tried_next() -> None:
    """The requests of a failed step show what those of smaller sizes could not."""

    def guess(probes: list[Probe]) -> Guess:
        has_failed = any(not probe.fits for probe in probes)
        return Guess(990 if has_failed else 1040)

    finding, probes = run_search(exact_device(990), guess=guess, replays=True)

    assert size_of(finding) == 990
    large = [probe.batch_size for probe in probes if probe.batch_size > 500]
    assert large[:2] == [1040, 990]
    assert len(large) <= 4


def test_a_guess_that_stands_after_a_size_above_it_failed_is_tried_next() -> None:
    """That failure is what it foresaw."""

    def guess(probes: list[Probe]) -> Guess:
        has_failed = any(not probe.fits for probe in probes)
        return Guess(988 if has_failed else 990)

    finding, probes = run_search(exact_device(988), guess=guess, replays=True)

    assert size_of(finding) == 988
    large = [probe.batch_size for probe in probes if probe.batch_size > 500]
    assert large == [990, 988, 989]


def test_a_guess_that_was_beaten_counts_again_once_a_confirmation_refutes_probes() -> None:
    """Probes do not see the steps that fail. It took eight more confirmations, one by one down."""

    class FailsLater(FakeProber):
        def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
            probe = super().probe(batch_size, confirm=confirm)
            fails = probe.fits and confirm and batch_size > 845
            return replace(probe, outcome=Outcome.OOM, steps=2) if fails else probe

    def guess(probes: list[Probe]) -> Guess:
        return Guess(max([836, *(p.batch_size for p in probes if p.fits and p.confirmed)]))

    exact = exact_device(1000)
    prober = FailsLater(**vars(exact) | {"reserved_extra": 0.05})
    finding, probes = run_search(prober, guess=guess, replays=True)

    assert 836 <= size_of(finding) <= 845
    assert sum(not probe.fits for probe in probes) == 2, story(probes)


@pytest.mark.parametrize("guess", [3, 30, 300])
def test_a_guess_far_too_low_is_dropped_where_the_allocator_is_fragmented(guess: int) -> None:
    prober = exact_device(1000, fixed_share=0.75)
    prober.reserved_extra, prober.noise = 0.02, 0.002

    finding, probes = run_search(prober, guess=Guess(guess))

    assert 970 <= size_of(finding) <= 1020  # peaks are noisy
    assert len(probes) <= 20


# Where readings repeat on a device whose verdicts need not, the answer is exact.


@pytest.mark.parametrize("maximum", [1, 2, 3, 7, 64, 100, 1000, 8191, 50_000])
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_step_that_runs_out_above_exactly_n_is_answered_with_n(
    maximum: int, share: float
) -> None:
    """Whether readings reach the budget by then, or nothing tells before it fails."""
    prober = unrepeatable_device(maximum)
    prober.curve = lambda size: (
        share * (prober.fixed_bytes + prober.bytes_per_sample * size)
        if size <= maximum
        else 2 * prober.budget_bytes
    )
    prober.confirm_steps = 6
    finding, _ = run_search(prober)
    assert size_of(finding) == maximum


def test_a_peak_that_falls_with_the_size_leads_nowhere() -> None:
    """As where a convolution changes its algorithm: 185 examples needed less than 154."""
    prober = exact_device(400)
    line = prober.bytes_per_sample
    prober.curve = lambda size: prober.fixed_bytes + line * (size - 60 * (size > 160))
    finding, probes = run_search(prober)
    assert size_of(finding) == 460
    assert max(probe.batch_size for probe in probes) <= 2 * 460
    assert sum(p.samples for p in probes) / 460 <= 10


def test_a_phase_that_hardly_grows_ends_the_line_far_away() -> None:
    """The optimizer step of a GPT-2, at sizes that a search tried: it wanders by a few MiB."""
    peaks = {1: 1386990080.0, 64: 1386440192.0, 96: 1386833408.0, 126: 1389774336.0}
    assert line(peaks, 76e9).end > 100 * 126
