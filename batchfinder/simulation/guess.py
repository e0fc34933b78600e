"""What the simulation expects of the device that is at hand, for a search to start from."""

from __future__ import annotations

import dataclasses

from batchfinder.errors import BatchFinderError, BatchTooSmallError, UsageError
from batchfinder.probing.options import ProbeOptions
from batchfinder.search.bounds import Bounds, check_bounds
from batchfinder.simulation.allocator.caching import AllocatorSettings
from batchfinder.simulation.gpus import Gpu, find_gpu, unnamed_gpu
from batchfinder.simulation.largest import largest_that_fits
from batchfinder.simulation.prober import SimulatedProber
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.training.setup import TrainingSetup


def guess_batch_size(
    setup: TrainingSetup,
    options: ProbeOptions,
    device: str,
    budget_bytes: int,
    bounds: Bounds,
) -> tuple[int | None, list[str]]:
    """The largest batch size that the simulation lets into a budget.

    A GPU that ``gpus.toml`` does not know counts as one with as much memory.

    Args:
        setup: what to train; it stays as it is.
        options: of the steps.
        device: the name of the one at hand, such as ``"cuda:0 NVIDIA H200"``.
        budget_bytes: what the steps may use.
        bounds: the smallest size, the largest or None, and what each is a multiple of.

    Returns:
        The size, or None where the simulation cannot tell; and what the user should know.

    Raises:
        Exception: what the user's code raises.
    """
    try:
        first, last = check_bounds(*bounds)
        traces, simulated = _simulated(setup, options, device, budget_bytes)
        bound = traces.at(first).upper_bound(budget_bytes)
        if not traces.are_general:
            bound = None
        guess = largest_that_fits(
            lambda batch_size: simulated.probe_with_room(batch_size)[1],
            last if bound is None else min(bound, last),
            smallest=first,
            multiple_of=bounds[2],
            expected=None if traces.are_general else first,
        )
    except BatchFinderError as error:
        if isinstance(error, BatchTooSmallError) and bounds[0] == 1:
            return guess_batch_size(setup, options, device, budget_bytes, (2, *bounds[1:]))
        return None, [f"the search started without an estimate: {error}"]
    return guess or None, []


def _simulated(
    setup: TrainingSetup, options: ProbeOptions, device: str, budget_bytes: int
) -> tuple[StepTraces, SimulatedProber]:
    gpu = _gpu(device, budget_bytes)
    # The budget is what limit, overhead and headroom have left.
    options = dataclasses.replace(options, memory_limit=None, headroom=0.0)
    traces = StepTraces(setup, options, gpu.compute_capability)
    return traces, SimulatedProber(traces, gpu, options, AllocatorSettings.of_this_process())


def _gpu(device: str, budget_bytes: int) -> Gpu:
    _, _, name = device.partition(" ")
    try:
        gpu = find_gpu(name)
    except UsageError:
        gpu = unnamed_gpu(budget_bytes)
    return dataclasses.replace(gpu, total_bytes=budget_bytes, overhead_bytes=0)
