"""A simulated estimate for the present device, from which a search starts."""

from __future__ import annotations

import dataclasses

from batchfinder.errors import BatchFinderError, BatchTooSmallError, UsageError
from batchfinder.probing.devices.allocator.caching import AllocatorSettings
from batchfinder.probing.options import ProbeOptions
from batchfinder.search.bounds import Bounds
from batchfinder.simulation.gpus import Gpu, find_gpu, unnamed_gpu
from batchfinder.simulation.largest import largest_that_fits
from batchfinder.simulation.prober import SimulatedProber
from batchfinder.simulation.tracing.step_trace import TRACED_SIZES, StepTraces
from batchfinder.training.setup import TrainingSetup


def starting_estimate(
    setup: TrainingSetup,
    options: ProbeOptions,
    device: str,
    budget_bytes: int,
    bounds: Bounds,
) -> tuple[int | None, list[str]]:
    """Return the largest batch size that fits a budget in the simulation.

    A device such as ``"cuda:0 NVIDIA H200"`` is simulated by its name; as an unnamed GPU with the
    same budget, if it is not in ``gpus.toml``.

    Returns:
        The size, or None if the simulation cannot find one; and warnings for the user.
    """
    try:
        gpu = _gpu(device, budget_bytes)
        # The budget already excludes the limit, the overhead and the headroom.
        options = dataclasses.replace(options, memory_limit=None, headroom=0.0)
        traces = StepTraces(setup, options, gpu.compute_capability)
        simulated = SimulatedProber(traces, gpu, options, AllocatorSettings.of_this_process())
        bound = traces.upper_bound(budget_bytes)
        guess = largest_that_fits(
            lambda batch_size: simulated.probe_with_room(batch_size)[1],
            bounds.last if bound is None else min(bound, bounds.last),
            smallest=bounds.first,
            multiple_of=bounds.multiple_of,
            expected=None if traces.are_general else TRACED_SIZES[-1],
        )
    except BatchFinderError as error:
        larger = bounds.without_first() if bounds.first == 1 else None
        if isinstance(error, BatchTooSmallError) and larger:
            return starting_estimate(setup, options, device, budget_bytes, larger)
        return None, [f"the search started without an estimate: {error}"]
    return guess or None, []


def _gpu(device: str, budget_bytes: int) -> Gpu:
    _, _, name = device.partition(" ")
    try:
        gpu = find_gpu(name)
    except UsageError:
        gpu = unnamed_gpu(budget_bytes)
    return dataclasses.replace(gpu, total_bytes=budget_bytes, overhead_bytes=0)
