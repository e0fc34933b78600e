"""Hypothesis strategies of all tests."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from fakes import AdversarialProber, FakeProber
from hypothesis import settings
from hypothesis import strategies as st

from batchfinder.results.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.results.memory_model import MemoryModel, Phase, PhaseModel
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.result import BatchSizeResult, NextFailure, Status
from batchfinder.search.bounds import Bounds
from batchfinder.simulation.trace.curve import Curve as StorageCurve
from batchfinder.units import GIB, MIB, TIB

thoroughly = settings(max_examples=max(200, settings().max_examples))
"""More examples than usual, for fast properties of the search."""

batch_sizes = st.integers(1, 2**24)
byte_counts = st.integers(1, 4 * TIB)
seconds = st.floats(0, 10_000)
texts = st.text(max_size=300)


@st.composite
def lines(draw: st.DrawFn) -> PhaseModel:
    """Draw the line of a phase, in whole bytes."""
    return PhaseModel(draw(st.integers(0, 2**40)), draw(st.integers(0, 2**32)))


@st.composite
def curves(draw: st.DrawFn) -> StorageCurve:
    """Draw a curve of whole bytes that never falls as the batch grows."""
    pairs = draw(st.integers(0, 2**10))
    return StorageCurve(draw(st.integers(0, 2**30)), draw(st.integers(-pairs, 2**24)), pairs)


def two_phase_models() -> st.SearchStrategy[MemoryModel]:
    """Draw a line for each phase, in whole bytes."""
    return st.fixed_dictionaries({phase: lines() for phase in Phase}).map(MemoryModel)


def distinct_batch_sizes(least: int) -> st.SearchStrategy[list[int]]:
    """Draw several distinct batch sizes in any order."""
    return st.lists(batch_sizes, min_size=least, max_size=8, unique=True)


@st.composite
def probes(draw: st.DrawFn) -> Probe:
    """Draw any probe that a prober could return."""
    return Probe(
        batch_size=draw(batch_sizes),
        outcome=draw(st.sampled_from(Outcome)),
        steps=draw(st.integers(0, 10)),
        samples=draw(batch_sizes),
        seconds=draw(seconds),
        step_seconds=draw(st.none() | seconds),
        peak_allocated_bytes=draw(st.none() | byte_counts),
        peak_reserved_bytes=draw(st.none() | byte_counts),
        phase_peak_bytes=draw(st.dictionaries(st.sampled_from(Phase), byte_counts)),
        allocation_retries=draw(st.integers(0, 10)),
        confirmed=draw(st.booleans()),
        note=draw(texts),
    )


@st.composite
def results(draw: st.DrawFn) -> BatchSizeResult:
    """Draw any result, consistent or not; rendering it must never fail."""
    failures = st.builds(
        NextFailure, batch_sizes, st.sampled_from([Outcome.OOM, Outcome.FAILED]), texts
    )
    return BatchSizeResult(
        batch_size=draw(st.just(0) | batch_sizes),
        status=draw(st.sampled_from(Status)),
        device=draw(texts),
        budget_bytes=draw(byte_counts),
        probes=tuple(draw(st.lists(probes(), max_size=4))),
        memory_model=draw(st.none() | two_phase_models()),
        next_failure=draw(st.none() | failures),
        confirmed_steps=draw(st.integers(0, 10)),
        cost_full_size_steps=draw(st.floats(0, 1000)),
        seconds=draw(seconds),
        versions=draw(st.dictionaries(texts, texts, max_size=2)),
        warnings=tuple(draw(st.lists(texts, max_size=2))),
    )


def accumulation_plans() -> st.SearchStrategy[AccumulationPlan]:
    """Draw a plan for any global batch size."""
    return st.builds(plan_accumulation, st.integers(1, 10**5), batch_sizes, st.integers(1, 64))


@dataclass(frozen=True)
class Curve:
    """A curve of peak memory by batch size; it never falls, except with a large ``wave``.

    Attributes:
        fixed_bytes: the peak at size 0.
        per_sample_bytes: the slope at small sizes.
        kink: the size at which the slope changes.
        steeper: factor of the slope above ``kink``; below 1 for a concave curve.
        bend: exponent of the batch size: 1 for a line, less for concave, more for convex.
        step_bytes: unit to which peaks are rounded up, as allocators do.
        wave: amplitude of a wave about the curve, as a fraction of it; not monotone if large.
    """

    fixed_bytes: float = 0
    per_sample_bytes: float = 1
    kink: float = math.inf
    steeper: float = 1
    bend: float = 1
    step_bytes: int = 1
    wave: float = 0

    def __call__(self, batch_size: int) -> float:
        samples = batch_size + (self.steeper - 1) * max(0.0, batch_size - self.kink)
        peak = self.fixed_bytes + self.per_sample_bytes * math.pow(samples, self.bend)
        peak *= 1 + self.wave * math.sin(batch_size)
        return math.ceil(peak / self.step_bytes) * self.step_bytes


@st.composite
def fake_probers(draw: st.DrawFn) -> FakeProber:
    """Draw a device: exact or noisy, with kinks, rounding, fragmentation, false readings or not."""
    seed = draw(st.integers(0, 2**32))
    if draw(st.integers(0, 3)) == 0:
        return AdversarialProber(
            budget_bytes=GIB,
            is_repeatable=draw(st.booleans()),
            seed=seed,
            fit_share=draw(st.floats(0, 1)),
            has_readings=draw(st.booleans()),
        )
    maximum = 10 ** draw(st.floats(-0.5, 7))
    fixed_share = draw(st.floats(0, 0.95))
    bend = draw(st.sampled_from([1.0, 1.0, 0.5, 0.8, 1.2, 2.0]))
    curve = Curve(
        fixed_bytes=fixed_share * GIB,
        per_sample_bytes=(1 - fixed_share) * GIB / maximum**bend,
        kink=maximum * draw(st.floats(0, 1)),
        steeper=draw(st.sampled_from([1, 1, 0.3, 2, 10])),
        bend=bend,
        step_bytes=draw(st.sampled_from([1, 512, 2 * MIB, 20 * MIB])),
        wave=draw(st.sampled_from([0, 0, 0.01, 0.3])),
    )
    return FakeProber(
        budget_bytes=GIB,
        curve=curve,
        optimizer_bytes=GIB * draw(st.sampled_from([0, 0.5, 0.9, 1])),
        fragmentation=draw(st.sampled_from([0, 0, 0.01, 0.04])),
        reserved_extra=draw(st.sampled_from([0, 0, 0.02, 0.15])),
        thrashing=draw(st.sampled_from([0, 0, 0.01, 0.04, 0.3])),
        thrashing_odds=draw(st.sampled_from([0.1, 0.7, 1])),
        noise=draw(st.sampled_from([0, 0, 0.002, 0.01, 0.1])),
        confirm_extra=draw(st.sampled_from([0, 0, 0.03, 0.1, 0.5])),
        is_repeatable=draw(st.booleans()),
        seed=seed,
    )


@st.composite
def search_bounds(draw: st.DrawFn) -> Bounds:
    """Draw bounds: a multiple of the unit, or a divisor of the global batch size, lies between."""
    unit = draw(st.sampled_from([1, 1, 2, 3, 8, 64]))
    smallest = draw(st.integers(1, 100))
    first = -(-smallest // unit) * unit
    largest = draw(st.none() | st.integers(first, first + 100) | st.integers(first, 10**6))
    if draw(st.integers(0, 3)) == 0:
        return Bounds.of(smallest, None, unit, unit * draw(st.integers(first // unit, 10**4)))
    return Bounds.of(smallest, largest, unit)


# Valid and invalid texts that users could give.

sizes_as_text = st.from_regex(
    r"\A[-+ ]?\d{0,400}(\.\d{1,3})?([eE]-?\d{1,4})?\s?([kmgtKMGT]?i?[bB]?|%)\Z"
)
specs = st.text(alphabet="float32int64bfloat16uint8bool[],: 0159abc-", max_size=40)
targets = st.builds(
    "".join, st.lists(st.sampled_from(["a.py", ":", "/", "..", ".", "b", "tests", "\0", "é", " "]))
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(texts, values, max_size=3),
    max_leaves=6,
)


@st.composite
def _results_as_json(draw: st.DrawFn) -> str:
    """Draw something like the JSON of a result, with any values."""
    probe = draw(st.sampled_from([Outcome.FITS.value, Outcome.OOM.value]))
    content = {
        "device": draw(st.sampled_from(["cuda:0 NVIDIA H200", "cpu"]) | json_values),
        "budget_bytes": draw(byte_counts | json_values),
        "probes": draw(
            st.lists(
                st.fixed_dictionaries(
                    {
                        "outcome": st.just(probe) | json_values,
                        "batch_size": batch_sizes | json_values,
                        "peak_reserved_bytes": byte_counts | json_values,
                    }
                ),
                max_size=3,
            )
            | json_values
        ),
    }
    return json.dumps(content)


json_texts = _results_as_json() | json_values.map(json.dumps)

_OPTIONS = [
    *("--sample", "--input", "--arg", "--headroom", "--precision", "--optimizer", "--accumulate"),
    *("--min-batch-size", "--max-batch-size", "--multiple-of", "--device", "--memory-limit"),
    *("--confirm-steps", "--probe-timeout", "--global-batch-size", "--json", "-q", "-v"),
    *("--gpu", "--memory", "--overhead", "--expandable-segments", "--explain"),
]
_VALUES = ["0", "1", "-3", "7", "1e9", "nan", "inf", "24GiB", "a=b", "fp16", "h100", "99999999999"]
command_lines = st.lists(st.sampled_from(_OPTIONS + _VALUES) | texts, max_size=6).map(" ".join)
