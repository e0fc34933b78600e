"""The search of a device on paper: a size costs milliseconds, and the trace bounds the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from batchfinder.bounds import Bounds
from batchfinder.conclusion import conclude
from batchfinder.memory_model import MemoryModel, PhaseModel
from batchfinder.result import BatchSizeResult, Probe, Status
from batchfinder.search import Finding
from batchfinder.simulation.largest import largest_that_fits
from batchfinder.simulation.prober import STAGES_OF_PHASE, SimulatedProber
from batchfinder.simulation.step_trace import StepTraces

# How far the real peak may lie above and below the simulated one: see scripts/bench_estimate.py.
MORE_THAN_SIMULATED = 0.05
LESS_THAN_SIMULATED = 0.02

# Where no trace tells the others, each size is traced by itself, and a batch of it made for that:
# no size is more than so many times one that fits.
GROWTH_UNTOLD = 16


def search_on_paper(
    prober: SimulatedProber, bounds: Bounds, expected: float | None = None
) -> BatchSizeResult:
    """The largest batch size that fits a simulated GPU, with the size above it that does not.

    Args:
        prober: of the GPU.
        bounds: the smallest size, the largest or None, and what each is a multiple of.
        expected: where the answer is looked for first; None: at the bound of the trace.

    Raises:
        StepError, Exception: see :meth:`StepTraces.at`.
    """
    started = time.monotonic()
    smallest, max_batch_size, multiple_of = bounds
    probes: dict[int, Probe] = {}

    def room(batch_size: int) -> float:
        probes[batch_size], room = prober.probe_with_room(batch_size)
        return room if prober.traces.are_general else min(room, (GROWTH_UNTOLD - 1) * batch_size)

    bound = prober.traces.at(smallest).upper_bound(prober.budget_bytes)
    if max_batch_size is not None:
        bound = max_batch_size if bound is None else min(bound, max_batch_size)
    if not prober.traces.are_general:
        bound, expected = max_batch_size, float(smallest)
    answer = largest_that_fits(
        room, bound, smallest=smallest, multiple_of=multiple_of, expected=expected
    )
    if answer and not prober.traces.hold_at(answer):
        return search_on_paper(prober, bounds)  # with a trace of each size
    if not answer and smallest not in probes:
        room(smallest)  # the bound alone ruled it out; the result names what failed
    if answer and max_batch_size is None and answer + multiple_of not in probes:
        room(answer + multiple_of)
    # Where the trace does not tell the slope, a second size far below does.
    if answer // 2 >= smallest and not prober.traces.are_general:
        room(answer // 2 // multiple_of * multiple_of or smallest)
    # That a size below the answer failed was chance, and bounds nothing.
    failed = [size for size, probe in probes.items() if not probe.fits and size > answer]
    failure = probes[min(failed)] if failed else None
    if answer:
        finding = Finding(Status.FOUND if failure else Status.CAPPED, probes[answer], failure)
    else:
        finding = Finding(Status.NOTHING_FITS, None, failure)
    seconds = time.monotonic() - started
    warnings = list(prober.warnings)
    model = None
    if answer and prober.traces.are_general:
        model = _memory_model(prober.traces, probes[answer])
    return conclude(prober, list(probes.values()), finding, seconds, warnings, model)


def expected_size(bound: int | None, answers: Mapping[int, int]) -> float | None:
    """What a GPU's answer may be.

    What fragmentation takes grows with the batch, but for a part: answers lie on a line.

    Args:
        bound: of the trace on this GPU; None: there is none.
        answers: those of other GPUs, by their bounds.

    Example:
        >>> expected_size(400, {100: 85, 200: 175})
        355.0
    """
    if not bound or not answers:
        return None
    nearest = min(answers, key=lambda other: abs(other - bound))
    farthest = max(answers, key=lambda other: abs(other - nearest))
    if abs(farthest - nearest) < nearest / 4:  # too close to tell a slope
        return answers[nearest] * bound / nearest
    slope = (answers[farthest] - answers[nearest]) / (farthest - nearest)
    return answers[nearest] + slope * (bound - nearest)


def _memory_model(traces: StepTraces, at_answer: Probe) -> MemoryModel:
    """Lines through the peaks at the answer: each example adds its share of what grows then."""
    size = at_answer.batch_size
    highest = max(at_answer.phase_peak_bytes.values())
    phases = {}
    for phase, peak in at_answer.phase_peak_bytes.items():
        curve = traces.at(size).highest_at(size, STAGES_OF_PHASE[phase])
        slope = curve.per_sample_at(size)
        miss = curve.per_pair_bytes * size * size / 4  # of the chord, halfway
        phases[phase] = PhaseModel(peak - slope * size, slope, miss / highest)
    return MemoryModel(phases)


def plausible_interval(
    result: BatchSizeResult, traces: StepTraces, max_batch_size: int | None, multiple_of: int
) -> tuple[int, int]:
    """What the batch size is if the step needs more, or less, than simulated."""
    answer = result.batch_size
    model = result.memory_model

    def shifted(needs: float) -> int:
        budget = result.budget_bytes / (1 + needs)
        if traces.are_general:
            trace = traces.at(answer or 1)
            bounds = [trace.upper_bound(round(size)) for size in (result.budget_bytes, budget)]
            if bounds[0] is None or bounds[1] is None:
                return answer
            # What fragmentation takes; unknown where nothing ran out of memory.
            lost = 0 if result.status is Status.CAPPED else bounds[0] - answer
            size = bounds[1] - lost
        elif model is None or not model.per_sample_bytes:
            return answer
        else:  # as steep as between the sizes tried
            size = answer + math.floor((budget - result.budget_bytes) / model.per_sample_bytes)
        size = size // multiple_of * multiple_of
        return max(0, size if max_batch_size is None else min(size, max_batch_size))

    return min(answer, shifted(MORE_THAN_SIMULATED)), max(answer, shifted(-LESS_THAN_SIMULATED))
