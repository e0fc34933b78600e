"""Verdicts on launches at neighboring sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batchfinder.launching.conclusion import overruled
from batchfinder.launching.options import RunOptions
from batchfinder.launching.prober import LaunchProber
from batchfinder.launching.record import Record
from batchfinder.launching.template import Template
from batchfinder.launching.verdict import judge
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome
from batchfinder.search.bounds import Bounds
from batchfinder.search.plan import Prices
from batchfinder.units import GIB


@pytest.mark.parametrize(
    ("said", "is_too_small"),
    [
        ("ValueError: Expected more than 1 value per channel when training, got [1, 8]", True),
        ("ValueError: Actual (not effective) batch size must be > 1.", True),
        ("AssertionError: `batch_size` must be greater than 1. See ...", True),
        ("ValueError: batch size must be < 1000", False),
    ],
)
def test_a_script_may_say_that_one_example_is_too_few(said: str, is_too_small: bool) -> None:
    record = Record(1, steps=3, headroom=0.05, cpu_budget_bytes=None)
    verdict = judge(record, 1, said, hung="")
    assert (verdict.too_small is not None, verdict.probe.outcome) == (is_too_small, Outcome.FAILED)


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
    judged = {probe.batch_size: probe.fits for probe in overruled(prober.launched, [failed])}
    assert judged == {100: False, 101: False}


def test_the_peak_of_a_launch_includes_its_validation() -> None:
    record = Record(1, steps=3, headroom=0.05, cpu_budget_bytes=GIB)
    facts = {"device": "cpu", "rank": 0, "processes": 1, "seconds": 1.0, "retries": 0}
    step = {"shapes": [[1, 8]], "elements": 8, "phases": {"forward_backward": 100}, **facts}
    for _ in range(8):
        record.add({"event": "step", "pid": 1, "allocated": 100, "reserved": 200, **step})
    record.epoch_end.has_begun = True
    seen = {"has_trained": True, "is_after": True, "allocated": 300, "reserved": 400}
    record.add({"event": "validated", "pid": 1, **seen})

    probe = judge(record, None, "", hung="").probe

    assert probe.fits
    assert (probe.peak_allocated_bytes, probe.peak_reserved_bytes) == (300, 400)
    assert probe.phase_peak_bytes[Phase.VALIDATION] == 300
