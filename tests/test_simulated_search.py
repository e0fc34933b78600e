"""The search on paper reports what it found, also above a size that fails by chance."""

from __future__ import annotations

import torch
from torch import nn

from batchfinder import TrainingSetup
from batchfinder.probing.options import ProbeOptions
from batchfinder.result import Outcome, Probe, Status
from batchfinder.simulated_search import search_on_paper
from batchfinder.simulation.gpus import unnamed_gpu
from batchfinder.simulation.prober import SimulatedProber
from batchfinder.simulation.step_trace import StepTraces
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

    result = search_on_paper(device, (1, None, 1))

    assert result.batch_size == device.round_size
    assert result.status is Status.FOUND
    assert result.next_failure is not None
    assert result.next_failure.batch_size == device.round_size + 1
    # That one below it failed is told all the same.
    assert any(not p.fits for p in result.probes if p.batch_size < result.batch_size)


def test_a_round_size_may_be_the_largest_asked_for() -> None:
    device = prober()

    result = search_on_paper(device, (1, device.round_size, 1))

    assert (result.batch_size, result.status) == (device.round_size, Status.CAPPED)
    assert result.next_failure is None
