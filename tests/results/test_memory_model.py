from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import batch_sizes, byte_counts, distinct_batch_sizes, two_phase_models

from batchfinder.results.memory_model import MemoryModel, Phase, PhaseModel, fit

FORWARD, OPTIMIZER = Phase.FORWARD_BACKWARD, Phase.OPTIMIZER_STEP


def read(model: MemoryModel, batch_size: int) -> tuple[int, Mapping[Phase, float]]:
    """Return the readings of a device whose memory follows the model exactly."""
    return batch_size, {phase: line.peak_bytes(batch_size) for phase, line in model.phases.items()}


def test_two_exact_readings_give_the_line() -> None:
    model = fit([(1, {FORWARD: 110}), (5, {FORWARD: 150})])
    assert model == MemoryModel({FORWARD: PhaseModel(100, 10)})


def test_one_size_gives_no_line() -> None:
    assert fit([]) is None
    assert fit([(4, {FORWARD: 100}), (4, {FORWARD: 101})]) is None


def test_the_higher_of_two_readings_counts() -> None:
    model = fit([(1, {FORWARD: 110}), (5, {FORWARD: 150}), (5, {FORWARD: 120})])
    assert model == MemoryModel({FORWARD: PhaseModel(100, 10)})


def test_a_phase_read_at_one_size_only_has_no_line() -> None:
    model = fit([(1, {FORWARD: 110, OPTIMIZER: 500}), (5, {FORWARD: 150})])
    assert model is not None
    assert set(model.phases) == {FORWARD}


def test_an_optimizer_step_that_hides_the_forward_pass_does_not_bend_its_line() -> None:
    # At 1 and 4 the step peaks in the optimizer, at 20 in the forward pass; one line through the
    # overall peaks (500, 500, 700) would promise far more than the 30 that fit.
    model = fit((b, {FORWARD: 100 + 30 * b, OPTIMIZER: 500}) for b in (1, 4, 20))
    assert model is not None
    assert [model.peak_bytes(b) for b in (1, 4, 13, 14, 20)] == pytest.approx(
        [500, 500, 500, 520, 700]
    )
    assert model.max_batch_size(1000) == 30
    assert model.fixed_bytes == pytest.approx(100)
    assert model.per_sample_bytes == pytest.approx(30)
    assert model.is_linear


def test_a_phase_that_never_grows_can_rule_out_every_size() -> None:
    model = MemoryModel({FORWARD: PhaseModel(100, 30), OPTIMIZER: PhaseModel(500, 0)})
    assert model.max_batch_size(499) == 0
    assert model.max_batch_size(500) == 13


def test_without_growth_there_is_no_maximum() -> None:
    model = fit([(1, {FORWARD: 100}), (64, {FORWARD: 100})])
    assert model is not None
    assert model.per_sample_bytes == 0
    assert model.max_batch_size(100) is None
    assert model.max_batch_size(99) == 0


def test_a_falling_peak_counts_as_no_growth() -> None:
    model = fit([(1, {FORWARD: 200}), (64, {FORWARD: 100})])
    assert model is not None
    assert model.per_sample_bytes == 0
    assert not model.is_linear


def test_large_sizes_weigh_more_than_rounding_at_small_ones() -> None:
    # The allocator's segments hide the slope at 1 to 4: 20 MiB held whatever they need.
    readings = {1: 20.0, 2: 20.0, 4: 20.0, 100: 110.0, 200: 210.0}
    model = fit((b, {FORWARD: peak}) for b, peak in readings.items())
    assert model is not None
    assert model.per_sample_bytes == pytest.approx(1, rel=0.01)
    assert not model.is_linear
    assert model.worst_residual == pytest.approx(0.035, abs=0.001)


def test_a_curve_is_not_linear() -> None:
    model = fit((b, {FORWARD: 100 + b * b}) for b in (1, 10, 100))
    assert model is not None
    assert not model.is_linear


def exact_fit(truth: MemoryModel, sizes: list[int]) -> MemoryModel:
    model = fit(read(truth, size) for size in sizes)
    assert model is not None
    return model


@given(two_phase_models(), distinct_batch_sizes(least=2))
def test_exact_readings_give_the_exact_lines(truth: MemoryModel, sizes: list[int]) -> None:
    assert exact_fit(truth, sizes) == truth


@given(two_phase_models(), distinct_batch_sizes(least=2), batch_sizes, batch_sizes)
def test_the_peak_never_falls(truth: MemoryModel, sizes: list[int], one: int, other: int) -> None:
    model = exact_fit(truth, sizes)
    smaller, larger = sorted((one, other))
    assert model.peak_bytes(smaller) <= model.peak_bytes(larger)


@given(two_phase_models(), byte_counts)
def test_the_maximum_fits_and_one_more_does_not(model: MemoryModel, budget: int) -> None:
    largest = model.max_batch_size(budget)
    if largest is None:
        assert model.peak_bytes(10**9) <= budget
    elif largest == 0:
        assert model.peak_bytes(1) > budget
    else:
        # A float holds 53 bits: a byte either way.
        assert model.peak_bytes(largest) <= budget + 1
        assert model.peak_bytes(largest + 1) > budget - 1


@given(
    st.integers(0, 2**36),
    st.integers(2**10, 2**30),
    st.lists(st.floats(-0.005, 0.005), min_size=4, max_size=4),
)
def test_noise_of_half_a_percent_moves_the_maximum_by_few_percent(
    fixed: int, slope: int, noise: list[float]
) -> None:
    truth = MemoryModel({FORWARD: PhaseModel(fixed, slope)})
    budget = fixed + 1000 * slope
    sizes = (1, 300, 700, 900)
    model = fit(
        (size, {FORWARD: truth.peak_bytes(size) * (1 + miss if fixed < 100 * slope else 1)})
        for size, miss in zip(sizes, noise, strict=True)
    )
    assert model is not None
    assert model.max_batch_size(budget) == pytest.approx(1000, rel=0.03)
