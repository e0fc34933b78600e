from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.errors import UsageError
from batchfinder.results.accumulation import AccumulationPlan, Split, plan_accumulation

globals_ = st.integers(1, 600)
limits = st.integers(1, 100)
worlds = st.integers(1, 9)


def test_a_global_batch_that_divides_is_split_exactly() -> None:
    assert plan_accumulation(4096, 1041) == AccumulationPlan(4096, Split(1024, 4, 1), None, None)


def test_ranks_share_the_global_batch() -> None:
    plan = plan_accumulation(4096, 100, world_size=8)
    assert plan == AccumulationPlan(4096, Split(64, 8, 8), None, None)
    assert str(plan) == "Global batch 4096 = 64 per device x 8 accumulation steps x 8 ranks"


def test_without_an_exact_split_both_nearest_are_given() -> None:
    plan = plan_accumulation(100, 64, world_size=8)
    assert plan == AccumulationPlan(100, None, Split(12, 1, 8), Split(13, 1, 8))
    assert str(plan) == (
        "Global batch 100 has no exact split; nearest with few steps: "
        "96 = 12 per device x 1 accumulation step x 8 ranks, "
        "or 104 = 13 per device x 1 accumulation step x 8 ranks"
    )


def test_a_slow_exact_split_comes_with_faster_alternatives() -> None:
    plan = plan_accumulation(97, 64)
    assert plan == AccumulationPlan(97, Split(1, 97, 1), Split(48, 2, 1), Split(49, 2, 1))
    assert str(plan) == (
        "Global batch 97 = 1 per device x 97 accumulation steps (far fewer steps: "
        "96 = 48 per device x 2 accumulation steps, or 98 = 49 per device x 2 accumulation steps)"
    )


def test_fewer_examples_than_ranks_leave_only_the_split_above() -> None:
    plan = plan_accumulation(3, 64, world_size=8)
    assert plan == AccumulationPlan(3, None, None, Split(1, 1, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1), "the global batch size must be at least 1, not 0"),
        ((1, 0, 1), "the batch size found must be at least 1, not 0"),
        ((1, 1, -2), "the world size must be at least 1, not -2"),
    ],
)
def test_numbers_must_be_positive(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_accumulation(*arguments)


def test_a_large_prime_is_fast() -> None:
    prime = 10**18 + 9
    assert plan_accumulation(prime, 2).exact == Split(1, prime, 1)


@given(globals_, limits, worlds)
def test_below_and_above_are_the_nearest_with_their_number_of_steps(
    total: int, limit: int, world: int
) -> None:
    plan = plan_accumulation(total, limit, world)
    assert plan.exact or plan.above
    for split in (plan.below, plan.above):
        if split is not None:
            unit = split.gradient_accumulation_steps * world
            assert abs(split.global_batch_size - total) <= unit
            fewer = Split(limit, split.gradient_accumulation_steps - 1, world)
            assert fewer.global_batch_size < total


def test_the_fastest_exact_split_is_by_the_rates_that_are_known() -> None:
    rates = {1024: 900.0, 512: 1000.0, 256: 990.0}
    plan = plan_accumulation(4096, 1041, rate_at=rates.get)
    assert (plan.exact, plan.fastest) == (Split(1024, 4, 1), Split(512, 8, 1))
    assert plan.best == plan.fastest
    assert str(plan).endswith("; fastest: 4096 = 512 per device x 8 accumulation steps")
    assert plan_accumulation(4096, 1041).best == Split(1024, 4, 1)
    assert plan_accumulation(100, 64, world_size=8).best in (Split(12, 1, 8), Split(13, 1, 8))


@given(globals_, limits, worlds, st.integers(1, 40), st.integers(1, 16))
def test_every_split_keeps_to_the_sizes_allowed(
    total: int, limit: int, world: int, least: int, multiple_of: int
) -> None:
    allowed = [n for n in range(least, limit + 1) if n % multiple_of == 0]
    if not allowed:
        with pytest.raises(UsageError, match=f"no micro-batch of at most {limit} is a multiple"):
            plan_accumulation(total, limit, world, min_batch_size=least, multiple_of=multiple_of)
        return
    plan = plan_accumulation(total, limit, world, min_batch_size=least, multiple_of=multiple_of)
    exact = [n for n in allowed if total % (n * world) == 0]
    largest = max(exact, default=0)
    assert plan.exact == (Split(largest, total // (largest * world), world) if largest else None)
    assert plan.exact or plan.above
    for split in filter(None, (plan.exact, plan.below, plan.above)):
        assert split.batch_size in allowed
        assert split.world_size == world
    assert plan.below is None or plan.below.global_batch_size < total
    assert plan.above is None or plan.above.global_batch_size > total


def test_the_sizes_allowed_are_why_no_split_is_exact() -> None:
    assert str(plan_accumulation(100, 48, min_batch_size=32, multiple_of=8)) == (
        "Global batch 100 has no exact split into multiples of 8 and at least 32 per device; "
        "nearest with few steps: 96 = 32 per device x 3 accumulation steps, "
        "or 120 = 40 per device x 3 accumulation steps"
    )
