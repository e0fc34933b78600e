"""What searches cost on fixed families: medians and 90th percentiles, in full-size steps.

The bounds are what the rules before this one took, or what is reached where that is more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import pytest
from fakes import FakeProber

from batchfinder.results.probe import Probe
from batchfinder.search.plan import Prices
from batchfinder.search.search import search
from batchfinder.units import GIB, MIB

COUNT = 48
BUDGET = 2 * GIB


def maximum(index: int) -> int:
    return round(10 ** (1 + 4 * index / COUNT))


def device(index: int, **changes: object) -> FakeProber:
    """Fits up to the maximum, unless something is changed."""
    line = 0.7 * BUDGET / (maximum(index) + 0.5)
    return FakeProber(
        budget_bytes=BUDGET,
        fixed_bytes=0.3 * BUDGET,
        bytes_per_sample=line,
        seed=index,
        **changes,  # type: ignore[arg-type]
    )


def rounded(index: int) -> FakeProber:
    line, unit = 0.7 * BUDGET / maximum(index), 20 * MIB
    return device(index, curve=lambda size: math.ceil((0.3 * BUDGET + line * size) / unit) * unit)


def kinked(index: int) -> FakeProber:
    largest = maximum(index)
    line = 0.7 * BUDGET / (1.5 * largest)
    return device(
        index, curve=lambda size: 0.3 * BUDGET + line * (size + max(0, size - largest / 2))
    )


def bent(index: int, power: float) -> FakeProber:
    largest = maximum(index)
    return device(index, curve=lambda size: BUDGET * (0.2 + 0.8 * (size / largest) ** power))


def noisy(index: int, noise: float) -> FakeProber:
    return device(
        index,
        noise=noise,
        confirm_extra=0.02 * (index % 3) * (noise > 0.005),
        is_repeatable=False,
        confirm_steps=6,
    )


def fragmented(index: int) -> FakeProber:
    return device(
        index,
        reserved_extra=0.02 + 0.002 * (index % 50),
        thrashing=0.01 + 0.002 * (index % 11),
        thrashing_odds=0.7,
    )


FAMILIES: list[tuple[str, Callable[[int], FakeProber], float, float]] = [
    ("exact", device, 5.0, 5.2),
    ("unseen", lambda i: device(i, fragmentation=0.005 + 0.003 * (i * 7 % 10)), 11.8, 17.9),
    ("fragmented", fragmented, 8.9, 11.7),
    (
        "confirmations need more",
        lambda i: device(i, reserved_extra=0.05, confirm_extra=0.01 + 0.02 * (i % 8)),
        29.5,
        34.3,
    ),
    ("kink", kinked, 9.7, 11.0),
    ("concave", lambda i: bent(i, 0.8), 8.8, 9.7),
    ("convex", lambda i: bent(i, 1.3), 13.5, 30.2),
    ("20 MiB", rounded, 10.2, 16.6),
    ("noisy", lambda i: noisy(i, 0.01), 13.5, 21.0),
    ("hardly noisy", lambda i: noisy(i, 0.002), 8.2, 9.5),
]


@pytest.mark.parametrize(
    ("make", "usual", "seldom"),
    [family[1:] for family in FAMILIES],
    ids=[family[0] for family in FAMILIES],
)
def test_what_a_search_costs(
    make: Callable[[int], FakeProber], usual: float, seldom: float
) -> None:
    costs = []
    for index in range(COUNT):
        prober, samples = make(index), 0

        def run(batch_size: int, confirm: bool, prober: FakeProber = prober) -> Probe:
            nonlocal samples
            probe = prober.probe(batch_size, confirm=confirm)
            samples += probe.samples
            return probe

        finding = search(run, budget_bytes=BUDGET, is_repeatable=prober.is_repeatable)
        assert finding.answer is not None
        costs.append(samples / finding.answer.batch_size)
    assert median(costs) <= usual
    assert sorted(costs)[int(0.9 * COUNT)] <= seldom


@pytest.mark.parametrize(
    ("fixed", "noise", "usual", "seldom"),
    [(0.3, 0.001, 5, 7), (0.6, 0.004, 5.5, 8), (0.6, 0.015, 7, 9), (0.9, 0.004, 8, 10)],
)
def test_how_many_launches_a_search_takes_where_memory_differs_from_run_to_run(
    fixed: float, noise: float, usual: float, seldom: float
) -> None:
    """Memory that every size needs hides what examples add, so small sizes tell little.

    When sizes grew fourfold, it took 6 (7 in one of ten), 7 (9), 8 (11) and 9 (12) launches.
    """
    launches = []
    for index in range(COUNT):
        prober = device(index, noise=noise, is_repeatable=False, confirm_steps=6)
        prober.fixed_bytes = fixed * BUDGET
        prober.bytes_per_sample = (1 - fixed) * BUDGET / maximum(index)

        def launch(batch_size: int, confirm: bool, prober: FakeProber = prober) -> Probe:
            return prober.probe(batch_size, confirm=True)

        prices = Prices(confirm=1, launch=5, resolution=0.03)
        finding = search(launch, budget_bytes=BUDGET, is_repeatable=False, prices=prices)
        assert finding.answer is not None
        launches.append(len(set(prober.sizes)))
    assert median(launches) <= usual
    assert sorted(launches)[int(0.9 * COUNT)] <= seldom
