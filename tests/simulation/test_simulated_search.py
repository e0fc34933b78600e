"""The search on paper reports what it found, also above a size that fails by chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchfinder import TrainingSetup, estimate_max_batch
from batchfinder.probing.options import ProbeOptions
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.result import Status
from batchfinder.search.bounds import ALL_SIZES, UNLIMITED_BATCH_SIZE, Bounds
from batchfinder.simulation.estimate import Estimate
from batchfinder.simulation.gpus import unnamed_gpu
from batchfinder.simulation.prober import SimulatedProber
from batchfinder.simulation.simulated_search import MOST_MADE, search_on_paper
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.units import GIB


class RoundSizesFit(SimulatedProber):
    """From three below the last multiple of 8 within the bound on only that one fits."""

    def probe_with_room(self, batch_size: int, *, confirm: bool = False) -> tuple[Probe, float]:
        probe, _ = super().probe_with_room(batch_size, confirm=confirm)
        last = self.round_size - 4
        fits = batch_size <= last or batch_size == self.round_size
        outcome = Outcome.FITS if fits else Outcome.OOM
        left = 0 if batch_size == self.round_size else last - batch_size
        peaks = probe.phase_peak_bytes
        return Probe(batch_size, outcome, 2, seconds=0.0, phase_peak_bytes=peaks), float(left)

    @property
    def round_size(self) -> int:
        bound = self.traces.at(1).upper_bound(self.budget_bytes)
        assert bound is not None
        return (bound - 1) // 8 * 8


def prober() -> RoundSizesFit:
    setup = TrainingSetup(
        nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 1)),
        torch.randn(2, 64),
        optimizer="sgd",
    )
    options = ProbeOptions(headroom=0.0)
    return RoundSizesFit(StepTraces(setup, options, (8, 6)), unnamed_gpu(3 * GIB), options)


def test_a_round_size_above_one_that_fails_is_the_answer() -> None:
    device = prober()

    result = search_on_paper(device, ALL_SIZES)

    assert result.batch_size == device.round_size
    assert result.status is Status.FOUND
    assert result.next_failure is not None
    assert result.next_failure.batch_size == device.round_size + 1
    # That one below it failed is told all the same.
    assert any(not p.fits for p in result.probes if p.batch_size < result.batch_size)


def test_a_round_size_may_be_the_largest_asked_for() -> None:
    device = prober()

    result = search_on_paper(device, Bounds.of(1, device.round_size))

    assert (result.batch_size, result.status) == (device.round_size, Status.CAPPED)
    assert result.next_failure is None


class Parting(nn.Module):
    """Does more above four examples, so that no two traces tell the others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.relu() if len(x) > 4 else y


def parting(width: int, gpu: str = "t4", sample: Any = None, **options: Any) -> Estimate:
    if sample is None and "make_batch" not in options:
        sample = torch.randn(2, width)
    return estimate_max_batch(
        Parting(width), sample, gpu=gpu, loss_fn=lambda output, batch: output.mean(), **options
    )


def test_where_the_maximum_ends_the_search_the_interval_starts_from_the_peak_there() -> None:
    estimate = parting(256, max_batch_size=64)

    assert estimate.result.status is Status.CAPPED
    assert (estimate.low, estimate.batch_size, estimate.high) == (64, 64, 64)


def test_a_maximum_just_below_the_answer_leaves_the_lower_end_where_it_was() -> None:
    free = parting(4096, memory_limit="4GiB")
    capped = parting(4096, memory_limit="4GiB", max_batch_size=free.batch_size - 1)

    assert free.result.status is Status.FOUND
    assert free.low < free.batch_size - 1 == capped.batch_size == capped.high
    assert abs(capped.low - free.low) <= free.batch_size * 0.01


@pytest.mark.parametrize("has_data", [True, False])
def test_where_nothing_ends_the_search_it_says_where_it_ended(has_data: bool) -> None:
    """And makes no data for the largest batches, unless the user's function does."""
    options: dict[str, Any] = {"make_batch": lambda n: torch.zeros(n, 1)} if has_data else {}

    estimate = parting(1, gpu="h100", **options)

    end = MOST_MADE if has_data else UNLIMITED_BATCH_SIZE
    assert (estimate.low, estimate.batch_size, estimate.high) == (end, end, end)
    assert f"up to a batch of {end}" in estimate.result.warnings[-1]


@pytest.mark.parametrize("model", [Parting(1024), nn.Linear(1024, 1024)])
@pytest.mark.parametrize("largest", [None, 4_001, 10**9])
def test_both_ends_of_the_interval_are_multiples(model: nn.Module, largest: int | None) -> None:
    estimate = estimate_max_batch(
        model,
        torch.randn(2, 1024),
        gpu="t4",
        memory_limit="3GiB",
        max_batch_size=largest,
        multiple_of=24,
        loss_fn=lambda output, batch: output.mean(),
    )

    sizes = estimate.low, estimate.batch_size, estimate.high
    assert [size % 24 for size in sizes] == [0, 0, 0]
    assert 0 < estimate.low <= estimate.batch_size <= estimate.high <= (largest or estimate.high)


def test_the_interval_of_a_tiny_model_surrounds_its_answer() -> None:
    estimate = estimate_max_batch(nn.Linear(8, 8), (torch.zeros(2, 8), torch.zeros(2, 8)), gpu="t4")
    assert estimate.batch_size > 2 * UNLIMITED_BATCH_SIZE
    assert 0.9 * estimate.batch_size < estimate.low < estimate.batch_size < estimate.high
