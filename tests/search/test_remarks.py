"""Warnings about how a search ended."""

from __future__ import annotations

import pytest
from fakes import FakeProber

from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.result import Status
from batchfinder.search.bounds import ALL_SIZES
from batchfinder.search.remarks import warnings_about
from batchfinder.search.search import Finding


@pytest.mark.parametrize(("validation_bytes", "warns"), [(950, False), (500, True)])
def test_a_failure_far_from_the_budget_is_named_unless_the_validation_needs_it(
    validation_bytes: int, warns: bool
) -> None:
    phases = {Phase.FORWARD_BACKWARD: 400, Phase.VALIDATION: validation_bytes}
    fits = Probe(100, Outcome.FITS, 3, 1.0, peak_reserved_bytes=450, phase_peak_bytes=phases)
    fails = Probe(105, Outcome.OOM, 4, 1.0, peak_reserved_bytes=470)
    finding = Finding(Status.FOUND, fits, fails)
    prober = FakeProber(budget_bytes=1000)
    prober.is_repeatable = True
    found = list(warnings_about(finding, prober, ALL_SIZES, expanded=None))
    assert any("failed before it reached the memory limit" in each for each in found) is warns
