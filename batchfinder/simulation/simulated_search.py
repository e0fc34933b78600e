"""The search on a simulated GPU: a try costs milliseconds, and the trace bounds the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from batchfinder.results.memory_model import MemoryModel, PhaseModel
from batchfinder.results.probe import Probe, peak_at
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.search.bounds import Bounds
from batchfinder.search.conclusion import conclude
from batchfinder.search.search import Finding
from batchfinder.simulation.largest import largest_that_fits
from batchfinder.simulation.prober import STAGES_OF_PHASE, SimulatedProber
from batchfinder.simulation.tracing.step_trace import TRACED_SIZES, StepTraces

# Fractions by which the real peak may exceed the simulated one, or be smaller. Measured by
# scripts/benchmarks/bench_estimate.py.
MORE_THAN_SIMULATED = 0.05
LESS_THAN_SIMULATED = 0.02

# If each size is traced separately, on a batch from make_batch, the search ends at this size
# unless a maximum was given: such batches use host memory.
MOST_MADE = 2**20


def search_on_paper(
    prober: SimulatedProber, bounds: Bounds, expected: float | None = None
) -> BatchSizeResult:
    """Find the largest batch size that fits a simulated GPU, and the next one that does not."""
    started = time.monotonic()
    traces = prober.traces
    smallest = bounds.first
    probes: dict[int, Probe] = {}

    def room(batch_size: int) -> float:
        probes[batch_size], room = prober.probe_with_room(batch_size)
        return room

    bound = traces.upper_bound(prober.budget_bytes)
    if not traces.are_general:
        expected = float(TRACED_SIZES[-1])  # its trace is there
    last = _last_size(traces, bounds, bound)
    answer = largest_that_fits(
        room,
        last if bound is None else min(bound, last),
        smallest=smallest,
        multiple_of=bounds.multiple_of,
        expected=expected,
    )
    if answer and not prober.traces.hold_at(answer):
        return search_on_paper(prober, bounds)  # now with a trace of each size
    if not answer and smallest not in probes:
        room(smallest)  # the bound alone excluded it; the result needs a failed probe
    above = bounds.after(answer)
    if answer and above not in probes and above <= last:
        room(above)
    # If the trace does not give the slope, a second, much smaller size does.
    if answer // 2 >= smallest and not traces.are_general:
        room(max(smallest, bounds.at_most(answer / 2)))
    # A size below the answer failed by chance, so it is not a bound.
    failed = [size for size, probe in probes.items() if not probe.fits and size > answer]
    failure = probes[min(failed)] if failed else None
    status = Status.FOUND if failure else Status.CAPPED
    finding = Finding(status if answer else Status.NOTHING_FITS, probes.get(answer), failure)
    seconds = time.monotonic() - started
    warnings = [*prober.warnings]
    if answer and not failure and bounds.is_open:
        warnings.append(
            f"nothing ran out of memory up to a batch of {answer}, and no larger one was tried; "
            "give the size of your data set as the largest batch size"
        )
    model = _memory_model(traces, probes[answer]) if answer and traces.are_general else None
    return conclude(prober, list(probes.values()), finding, seconds, warnings, model)


def _last_size(traces: StepTraces, bounds: Bounds, bound: int | None) -> int:
    """Return the largest size to try: one above the trace's bound, to show that it fails."""
    if not bounds.is_open:
        return bounds.last
    if bound is not None:
        return bounds.after(bound)
    is_cheap = traces.are_general or traces.makes_own_batches
    return bounds.last if is_cheap else max(bounds.first, min(bounds.last, MOST_MADE))


def expected_size(bound: int | None, answers: Mapping[int, int]) -> float | None:
    """Return the probable answer for a GPU, from the answers for other GPUs.

    The memory lost to fragmentation mostly grows with the batch, so answers are nearly on a line.

    Args:
        bound: the bound of the trace on this GPU; None if there is none.
        answers: the answers for other GPUs, by the bounds on them.

    Example:
        >>> expected_size(400, {100: 85, 200: 175})
        355.0
    """
    if not bound or not answers:
        return None
    nearest = min(answers, key=lambda other: abs(other - bound))
    farthest = max(answers, key=lambda other: abs(other - nearest))
    if abs(farthest - nearest) < nearest / 4:  # too close for a reliable slope
        return answers[nearest] * bound / nearest
    slope = (answers[farthest] - answers[nearest]) / (farthest - nearest)
    return answers[nearest] + slope * (bound - nearest)


def _memory_model(traces: StepTraces, at_answer: Probe) -> MemoryModel:
    """Return lines through the peaks at the answer. Their slope is each example's share there."""
    size = at_answer.batch_size
    highest = max(at_answer.phase_peak_bytes.values())
    phases = {}
    for phase, peak in at_answer.phase_peak_bytes.items():
        curve = traces.at(size).highest_at(size, STAGES_OF_PHASE[phase])
        slope = curve.per_sample_at(size)
        miss = curve.per_pair_bytes * size * size / 4  # of the chord, halfway to the answer
        phases[phase] = PhaseModel(peak - slope * size, slope, miss / highest)
    return MemoryModel(phases)


def plausible_interval(
    result: BatchSizeResult, traces: StepTraces, bounds: Bounds
) -> tuple[int, int]:
    """Return the batch sizes if the step needs more, or less, memory than simulated."""
    answer = result.batch_size
    if bounds.is_open:  # the search ended where the memory does, maybe above the usual last size
        bounds = bounds._replace(last=max(bounds.last, 2 * answer))
    # If nothing ran out of memory, the end of the search does not depend on the step's memory.
    is_capped = result.status is Status.CAPPED
    largest = answer if is_capped else bounds.last
    model = result.memory_model

    def shifted(needs: float) -> int:
        budget = result.budget_bytes / (1 + needs)
        if traces.are_general:
            trace = traces.at(answer or 1)
            at_most = [trace.upper_bound(round(size)) for size in (result.budget_bytes, budget)]
            if at_most[0] is None or at_most[1] is None:
                return answer
            # The examples lost to fragmentation; unknown if nothing ran out of memory.
            lost = 0 if is_capped else at_most[0] - answer
            size = at_most[1] - lost
        elif model is None or not model.per_sample_bytes:
            return answer
        else:  # use the slope between the sizes tried
            peak = peak_at(result.probes, answer) if is_capped else result.budget_bytes
            size = answer + math.floor((budget - (peak or 0)) / model.per_sample_bytes)
        return max(0, bounds.at_most(min(size, largest)))

    return min(answer, shifted(MORE_THAN_SIMULATED)), max(answer, shifted(-LESS_THAN_SIMULATED))
