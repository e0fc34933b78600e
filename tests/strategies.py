"""Hypothesis strategies: what the tests draw at random, in one place."""

from __future__ import annotations

from hypothesis import strategies as st

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.memory_model import MemoryModel, Phase, PhaseModel
from batchfinder.result import BatchSizeResult, NextFailure, Outcome, Probe, Status
from batchfinder.units import TIB

batch_sizes = st.integers(1, 2**24)
byte_counts = st.integers(1, 4 * TIB)
seconds = st.floats(0, 10_000)
texts = st.text(max_size=300)


@st.composite
def lines(draw: st.DrawFn) -> PhaseModel:
    """The line of a phase, in whole bytes."""
    return PhaseModel(draw(st.integers(0, 2**40)), draw(st.integers(0, 2**32)))


def two_phase_models() -> st.SearchStrategy[MemoryModel]:
    """A line for each phase, in whole bytes."""
    return st.fixed_dictionaries({phase: lines() for phase in Phase}).map(MemoryModel)


def distinct_batch_sizes(least: int) -> st.SearchStrategy[list[int]]:
    """Several batch sizes, each once, in any order."""
    return st.lists(batch_sizes, min_size=least, max_size=8, unique=True)


@st.composite
def probes(draw: st.DrawFn) -> Probe:
    """Any probe that a prober could hand back."""
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
        confirmed=draw(st.booleans()),
        note=draw(texts),
    )


@st.composite
def results(draw: st.DrawFn) -> BatchSizeResult:
    """Any result, consistent in itself or not: what shows it must never fail."""
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
    """A plan for any global batch size."""
    return st.builds(plan_accumulation, st.integers(1, 10**5), batch_sizes, st.integers(1, 64))
