from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from strategies import probes, results

from batchfinder.errors import UsageError
from batchfinder.results.accumulation import Split
from batchfinder.results.memory_model import MemoryModel, Phase, PhaseModel
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.result import BatchSizeResult, NextFailure, Status
from batchfinder.results.version import SCHEMA_VERSION

PROBE = Probe(
    batch_size=16,
    outcome=Outcome.FITS,
    steps=3,
    samples=48,
    seconds=0.5,
    step_seconds=0.125,
    peak_allocated_bytes=900,
    peak_reserved_bytes=1000,
    phase_peak_bytes={Phase.FORWARD_BACKWARD: 1000, Phase.OPTIMIZER_STEP: 800},
    confirmed=True,
    note="NaN loss",
)
RESULT = BatchSizeResult(
    batch_size=16,
    status=Status.FOUND,
    device="cpu",
    budget_bytes=1024,
    probes=(PROBE,),
    memory_model=MemoryModel({Phase.FORWARD_BACKWARD: PhaseModel(100.4, 56.25, 0.001)}),
    next_failure=NextFailure(17, Outcome.OOM, "out of memory"),
    confirmed_steps=3,
    cost_full_size_steps=3.0,
    seconds=1.5,
    versions={"python": "3.12"},
    warnings=("pass loss_fn",),
)


def test_the_json_has_every_value_in_raw_units() -> None:
    assert json.loads(RESULT.to_json()) == {
        "schema_version": SCHEMA_VERSION,
        "batch_size": 16,
        "status": "found",
        "device": "cpu",
        "budget_bytes": 1024,
        "world_size": 1,
        "rank_peak_bytes": [],
        "limiting_rank": None,
        "estimated_batch_size": None,
        "seconds_by_part": {},
        "memory_model": {
            "fixed_bytes": 100,
            "per_sample_bytes": 56.2,
            "is_linear": True,
            "worst_residual": 0.001,
            "phases": {"forward_backward": {"fixed_bytes": 100, "per_sample_bytes": 56.2}},
        },
        "probes": [
            {
                "batch_size": 16,
                "outcome": "fits",
                "peak_allocated_bytes": 900,
                "peak_reserved_bytes": 1000,
                "phase_peak_bytes": {"forward_backward": 1000, "optimizer_step": 800},
                "seconds": 0.5,
                "step_seconds": 0.125,
                "steps": 3,
                "samples": 48,
                "allocation_retries": 0,
                "confirmed": True,
                "note": "NaN loss",
                "most_examples": None,
                "steps_differ": False,
                "rank_peak_bytes": [],
                "limiting_rank": None,
                "steps_seconds": [],
                "outside_bytes": None,
            }
        ],
        "next_failure": {"batch_size": 17, "outcome": "oom", "reason": "out of memory"},
        "confirmed_steps": 3,
        "cost_full_size_steps": 3.0,
        "seconds": 1.5,
        "versions": {"python": "3.12"},
        "warnings": ["pass loss_fn"],
        "mode": "train",
        "eval_batch_size": None,
        "remembered_from": None,
        "is_divided": False,
        "is_final": True,
        "throughput": None,
        "notes": [],
    }


def test_unknown_values_are_null() -> None:
    data = dataclasses.replace(RESULT, memory_model=None, next_failure=None).to_dict()
    assert data["memory_model"] is None
    assert data["next_failure"] is None


@given(results())
def test_every_result_is_one_line_of_strict_json(result: BatchSizeResult) -> None:
    text = result.to_json()
    assert "\n" not in text
    assert json.loads(text)["batch_size"] == result.batch_size


@given(probes())
def test_a_probe_survives_a_json_round_trip(probe: Probe) -> None:
    assert Probe.from_dict(json.loads(json.dumps(probe.to_dict()))) == probe


@pytest.mark.parametrize("missing", ["outcome", "steps", "batch_size"])
def test_a_missing_field_is_an_error(missing: str) -> None:
    data = PROBE.to_dict()
    del data[missing]
    with pytest.raises((KeyError, TypeError)):
        Probe.from_dict(data)


def test_the_json_of_another_version_may_have_fewer_names_or_more() -> None:
    data = {**PROBE.to_dict(), "new": 1}
    del data["steps_differ"]
    assert Probe.from_dict(data) == PROBE


def test_an_unknown_outcome_is_an_error() -> None:
    with pytest.raises(ValueError, match="'splendid' is not a valid Outcome"):
        Probe.from_dict({**PROBE.to_dict(), "outcome": "splendid"})


def test_int_of_a_result_is_its_batch_size() -> None:
    assert int(RESULT) == 16
    assert str(RESULT) == "batch size 16 (found) on cpu in 1.50 s"


def test_a_notebook_shows_the_summary() -> None:
    assert repr(RESULT) == f"<BatchSizeResult: {RESULT}>"


@pytest.mark.parametrize("thing", [RESULT, PROBE, RESULT.next_failure])
def test_results_are_frozen(thing: object) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(thing, "batch_size", 17)  # noqa: B010 - mypy rightly refuses the plain spelling


def test_a_probe_reads_as_one_line() -> None:
    assert str(PROBE) == "batch size 16: fits, NaN loss, peak 1000 B in 500 ms"
    unrun = dataclasses.replace(PROBE, note="it did not run", seconds=0, phase_peak_bytes={})
    unrun = dataclasses.replace(unrun, peak_allocated_bytes=None, peak_reserved_bytes=None)
    assert str(unrun) == "batch size 16: fits, it did not run"


def test_only_fits_fits() -> None:
    fits = {o: dataclasses.replace(PROBE, outcome=o).fits for o in Outcome}
    assert fits == {Outcome.FITS: True, Outcome.OOM: False, Outcome.FAILED: False}


def test_a_result_plans_accumulation_with_the_size_found() -> None:
    assert RESULT.accumulation_plan(256, world_size=2).exact == Split(16, 8, 2)


def test_nothing_fits_says_what_does_not() -> None:
    failure = NextFailure(1, Outcome.OOM, "out of memory")
    result = dataclasses.replace(
        RESULT, batch_size=0, status=Status.NOTHING_FITS, next_failure=failure
    )
    text = "batch size 0 (nothing_fits) on cpu in 1.50 s: batch size 1 needs more than 1.0 KiB"
    assert str(result) == text


def test_planning_fails_if_nothing_fits() -> None:
    with pytest.raises(UsageError, match="the batch size found must be at least 1"):
        dataclasses.replace(RESULT, batch_size=0).accumulation_plan(256)
