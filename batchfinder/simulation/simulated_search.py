"""The search of a device on paper: a size costs milliseconds, and the trace bounds the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping

from batchfinder.results.memory_model import MemoryModel, PhaseModel
from batchfinder.results.probe import Probe
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.search.bounds import Bounds, check_bounds
from batchfinder.search.conclusion import conclude
from batchfinder.search.search import Finding
from batchfinder.simulation.largest import largest_that_fits
from batchfinder.simulation.prober import STAGES_OF_PHASE, SimulatedProber
from batchfinder.simulation.tracing.step_trace import StepTraces

# How far the real peak may lie above and below the simulated one: see scripts/bench_estimate.py.
MORE_THAN_SIMULATED = 0.05
LESS_THAN_SIMULATED = 0.02

# Where each size is traced by itself, on what make_batch returns for it, the search ends here
# unless a maximum was given: the host has to hold such batches.
MOST_MADE = 2**20


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
    traces = prober.traces
    smallest, _, multiple_of = bounds
    probes: dict[int, Probe] = {}

    def room(batch_size: int) -> float:
        probes[batch_size], room = prober.probe_with_room(batch_size)
        return room

    bound = traces.at(smallest).upper_bound(prober.budget_bytes)
    if not traces.are_general:
        bound, expected = None, float(smallest)
    last = _last_size(traces, bounds, bound)
    answer = largest_that_fits(
        room,
        last if bound is None else min(bound, last),
        smallest=smallest,
        multiple_of=multiple_of,
        expected=expected,
    )
    if answer and not prober.traces.hold_at(answer):
        return search_on_paper(prober, bounds)  # with a trace of each size
    if not answer and smallest not in probes:
        room(smallest)  # the bound alone ruled it out; the result names what failed
    if answer and answer + multiple_of not in probes and answer + multiple_of <= last:
        room(answer + multiple_of)
    # Where the trace does not tell the slope, a second size far below does.
    if answer // 2 >= smallest and not traces.are_general:
        room(answer // 2 // multiple_of * multiple_of or smallest)
    # That a size below the answer failed was chance, and bounds nothing.
    failed = [size for size, probe in probes.items() if not probe.fits and size > answer]
    failure = probes[min(failed)] if failed else None
    status = Status.FOUND if failure else Status.CAPPED
    finding = Finding(status if answer else Status.NOTHING_FITS, probes.get(answer), failure)
    seconds = time.monotonic() - started
    warnings = [*prober.warnings, *_remarks_on(finding, bounds)]
    model = None
    if answer and traces.are_general:
        model = _memory_model(traces, probes[answer])
    return conclude(prober, list(probes.values()), finding, seconds, warnings, model)


def _last_size(traces: StepTraces, bounds: Bounds, bound: int | None) -> int:
    """The largest size that may be tried; one above the bound of the trace is to show that."""
    smallest, max_batch_size, multiple_of = bounds
    if max_batch_size is not None:
        return max_batch_size
    if bound is not None:
        return bound + multiple_of
    _, last = check_bounds(*bounds)
    is_cheap = traces.are_general or traces.makes_own_batches
    return last if is_cheap else max(smallest, min(last, MOST_MADE))


def _remarks_on(finding: Finding, bounds: Bounds) -> Iterator[str]:
    _, max_batch_size, _ = bounds
    if finding.answer and not finding.failure and max_batch_size is None:
        yield (
            f"nothing ran out of memory up to a batch of {finding.answer.batch_size}, and no "
            "larger one was tried; give the size of your data set as the largest batch size"
        )


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
    result: BatchSizeResult, traces: StepTraces, bounds: Bounds
) -> tuple[int, int]:
    """What the batch size is if the step needs more, or less, than simulated.

    Args:
        result: of the search.
        traces: that it searched with.
        bounds: of the search.
    """
    answer = result.batch_size
    _, max_batch_size, multiple_of = bounds
    # Nothing ran out of memory: what ends the search is not moved by what a step needs.
    is_capped = result.status is Status.CAPPED
    largest = answer if is_capped else max_batch_size
    model = result.memory_model

    def shifted(needs: float) -> int:
        budget = result.budget_bytes / (1 + needs)
        if traces.are_general:
            trace = traces.at(answer or 1)
            at_most = [trace.upper_bound(round(size)) for size in (result.budget_bytes, budget)]
            if at_most[0] is None or at_most[1] is None:
                return answer
            # What fragmentation takes; unknown where nothing ran out of memory.
            lost = 0 if is_capped else at_most[0] - answer
            size = at_most[1] - lost
        elif model is None or not model.per_sample_bytes:
            return answer
        else:  # as steep as between the sizes tried
            taken = _peak_bytes(result) if is_capped else result.budget_bytes
            size = answer + math.floor((budget - taken) / model.per_sample_bytes)
        size = size if largest is None else min(size, largest)
        return max(0, size // multiple_of * multiple_of)

    return min(answer, shifted(MORE_THAN_SIMULATED)), max(answer, shifted(-LESS_THAN_SIMULATED))


def _peak_bytes(result: BatchSizeResult) -> int:
    """What is reserved at the answer."""
    at_answer = [probe for probe in result.probes if probe.batch_size == result.batch_size]
    return max(probe.peak_reserved_bytes or 0 for probe in at_answer)
