"""Verdicts on launches at neighboring sizes."""

from __future__ import annotations

import sys
from pathlib import Path

from batchfinder.launching.options import RunOptions
from batchfinder.launching.prober import LaunchProber
from batchfinder.launching.template import Template
from batchfinder.results.probe import Outcome
from batchfinder.search.bounds import Bounds
from batchfinder.search.plan import Prices
from batchfinder.units import GIB


def test_on_the_cpu_a_size_just_below_a_failure_counts_as_failed() -> None:
    script = [sys.executable, str(Path(__file__).with_name("script.py")), "--limit", "100"]
    template = Template([*script, "--manner", "swallows", "--batch-size", "{batch_size}"])
    options = RunOptions(device="cpu", memory_limit=4 * GIB)
    prober = LaunchProber(template, options, Bounds.of(100), Prices(confirm=1))
    assert prober.probe(100).fits
    failed = prober.probe(101)
    assert (failed.batch_size, failed.outcome) == (100, Outcome.OOM)
    assert failed.note == "a launch at 101 ran out, and memory differs by more from run to run"
    assert not prober.probe(100).fits
    judged = {probe.batch_size: probe.fits for probe in prober.judged([failed])}
    assert judged == {100: False, 101: False}
