"""``estimate_max_batch()``: the same answer as ``find_max_batch()``, for a GPU you do not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from batchfinder.errors import UsageError, warn_of
from batchfinder.probing.options import ProbeOptions
from batchfinder.results.result import Status
from batchfinder.search.bounds import check_bounds, whole_bounds, whole_number
from batchfinder.simulation.allocator.caching import AllocatorSettings
from batchfinder.simulation.estimate import Estimate, PeakEstimate
from batchfinder.simulation.explanation import explain
from batchfinder.simulation.gpus import Gpu, find_gpu
from batchfinder.simulation.prober import SimulatedProber
from batchfinder.simulation.simulated_search import (
    expected_size,
    plausible_interval,
    search_on_paper,
)
from batchfinder.simulation.tracing.cluster import Cluster
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.training.completion import completed
from batchfinder.training.setup import (
    LossFunction,
    MakeBatch,
    OptimizerSpec,
    StepFunction,
    Trainer,
    TrainingSetup,
    setup_of,
)
from batchfinder.units import parse_bytes


def estimate_max_batch(
    model: nn.Module | Trainer | TrainingSetup,
    sample: Any = None,
    *,
    gpu: str | Gpu,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerSpec | None = None,
    step: StepFunction | None = None,
    make_batch: MakeBatch | None = None,
    memory_limit: str | int | None = None,
    headroom: float = 0.05,
    precision: str = "fp32",
    accumulate: bool = False,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    multiple_of: int = 1,
    batch_dim: int = 0,
    expandable_segments: bool = False,
) -> Estimate:
    """Estimate the largest batch size that trains on a GPU, without that GPU or any other.

    The training step is run on tensors without data, and its allocations are replayed in a model
    of the CUDA caching allocator. Model, optimizer, sample and random numbers stay as they are, and
    a step that draws some draws the same in each estimate.

    Args:
        model: the module to train; or instead of this, ``sample``, ``loss_fn``, ``optimizer``,
            ``step`` and ``make_batch`` a :class:`TrainingSetup`, or a ``transformers.Trainer``,
            which brings those of them that are not given.
        sample: one batch as the DataLoader yields it, of any size.
        gpu: a name from ``batchfinder gpus``, or a :class:`Gpu`: :func:`find_gpu` gives those
            known, ``dataclasses.replace`` changes them.
        loss_fn: see :func:`batchfinder.find_max_batch`, as for all that follow.
        optimizer: see there.
        step: see there.
        make_batch: see there.
        memory_limit: as if the GPU had no more than this: bytes, or text as ``"24GiB"``.
        headroom: fraction of the memory kept free, from 0 to below 1.
        precision: ``"fp32"``, or ``"bf16"`` / ``"fp16"`` with autocast (fp16: and a GradScaler).
        accumulate: with gradient accumulation.
        min_batch_size: the smallest size to try.
        max_batch_size: the largest size to try.
        multiple_of: only multiples of this are tried.
        batch_dim: index of the batch dimension.
        expandable_segments: as with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.

    Returns:
        The estimate: ``batch_size`` (0 if nothing fits), ``low`` and ``high``, the sizes between
        which the true one plausibly lies, ``peak_bytes``, and in ``explanation`` what it goes to.

    Warns:
        BatchFinderWarning: of each of the result's ``warnings``.

    Raises:
        UsageError: an argument makes no sense, or the GPU is unknown.
        SampleError, DeviceError: see :mod:`batchfinder.errors`.
        StepError: the step cannot run without data; the text says where.
        Exception: what the model or one of the functions raises.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1024, 1024)
        >>> sample = torch.randn(8, 1024), torch.randn(8, 1024)
        >>> estimate_max_batch(model, sample, gpu="rtx3090", max_batch_size=64).batch_size
        64
    """
    setup, warnings = completed(setup_of(model, sample, loss_fn, optimizer, step, make_batch))
    options = ProbeOptions(
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        headroom=headroom,
        precision=precision,
        accumulate=accumulate,
        batch_dim=batch_dim,
    )
    (estimate,) = estimate_on_gpus(
        setup,
        [find_gpu(gpu) if isinstance(gpu, str) else gpu],
        options,
        AllocatorSettings(expandable_segments=expandable_segments),
        min_batch_size=min_batch_size,
        max_batch_size=max_batch_size,
        multiple_of=multiple_of,
    )
    result = estimate.result
    result = dataclasses.replace(result, warnings=(*warnings, *result.warnings))
    warn_of(result.warnings)
    return dataclasses.replace(estimate, result=result)


def estimate_peak_memory(
    model: nn.Module | Trainer | TrainingSetup,
    sample: Any = None,
    *,
    batch_size: int,
    gpu: str | Gpu,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerSpec | None = None,
    step: StepFunction | None = None,
    make_batch: MakeBatch | None = None,
    headroom: float = 0.0,
    precision: str = "fp32",
    accumulate: bool = False,
    batch_dim: int = 0,
    expandable_segments: bool = False,
) -> PeakEstimate:
    """Estimate the peak memory of a training step at one batch size.

    Args:
        model: see :func:`estimate_max_batch`, as for all that is not told here.
        sample: see there.
        batch_size: examples per forward/backward pass.
        gpu: see there; for another memory, give a :class:`Gpu` of so many ``total_bytes``.
        loss_fn: see there.
        optimizer: see there.
        step: see there.
        make_batch: see there.
        headroom: fraction of the memory kept free, which decides whether the size fits; none is
            by default, unlike there.
        precision: see there.
        accumulate: see there.
        batch_dim: see there.
        expandable_segments: see there.

    Returns:
        The estimate: ``fits``, ``peak_bytes`` of the whole process, and in ``explanation`` what
        they go to.

    Warns:
        BatchFinderWarning: of each of the result's ``warnings``.

    Raises:
        UsageError, SampleError, DeviceError, StepError, Exception: as there.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1024, 1024)
        >>> sample = torch.randn(8, 1024), torch.randn(8, 1024)
        >>> estimate_peak_memory(model, sample, batch_size=64, gpu="t4").fits
        True
    """
    batch_size = whole_number("batch_size", batch_size)
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, not {batch_size}")
    setup, warnings = completed(setup_of(model, sample, loss_fn, optimizer, step, make_batch))
    options = ProbeOptions(
        headroom=headroom, precision=precision, accumulate=accumulate, batch_dim=batch_dim
    )
    device = find_gpu(gpu) if isinstance(gpu, str) else gpu
    settings = AllocatorSettings(expandable_segments=expandable_segments)
    traces = StepTraces(setup, options, device.compute_capability)
    prober = SimulatedProber(traces, device, options, settings)
    traces.at(batch_size)
    traces.hold_at(batch_size)
    run = prober.replay(batch_size)
    fits = run.trains
    if not fits:
        # The peak that would be needed, not the one at which it ran out.
        roomy = dataclasses.replace(device, total_bytes=1 << 50)
        run = SimulatedProber(traces, roomy, options, settings).replay(batch_size)
    warnings = [*warnings, *traces.warnings]
    warn_of(warnings)
    return PeakEstimate(
        device,
        batch_size,
        fits,
        run.peak_allocated_bytes,
        run.peak_reserved_bytes,
        explain(
            traces.at(batch_size),
            batch_size,
            gpu=device,
            reserved_bytes=run.peak_reserved_bytes,
        ),
        tuple(warnings),
    )


def estimate_on_gpus(
    setup: TrainingSetup,
    gpus: Sequence[Gpu],
    options: ProbeOptions,
    settings: AllocatorSettings | None = None,
    *,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    multiple_of: int = 1,
    cluster: Cluster | None = None,
) -> list[Estimate]:
    """The estimate for each of several GPUs; GPUs with the same kernels share their traces.

    Args:
        setup: what to train.
        gpus: at least one.
        options: of the steps and the budget.
        settings: of the caching allocator.
        min_batch_size: see :func:`estimate_max_batch`.
        max_batch_size: see there.
        multiple_of: see there.
        cluster: of which each GPU is one rank; None: it trains alone.

    Raises:
        UsageError, SampleError, StepError, DeviceError, Exception: as there.
    """
    _, max_batch_size, multiple_of = whole_bounds(min_batch_size, max_batch_size, multiple_of)
    smallest, _ = check_bounds(min_batch_size, max_batch_size, multiple_of)
    made: list[StepTraces] = []
    estimates: list[Estimate] = []
    answers: dict[int, int] = {}
    for gpu in gpus:
        traces = next((some for some in made if some.hold_for(gpu.compute_capability)), None)
        if traces is None:
            traces = StepTraces(setup, options, gpu.compute_capability, cluster)
            made.append(traces)
        prober = SimulatedProber(traces, gpu, options, settings)
        bounds = (smallest, max_batch_size, multiple_of)
        bound = traces.at(smallest).upper_bound(prober.budget_bytes)
        result = search_on_paper(prober, bounds, expected_size(bound, answers))
        shown = result.batch_size or smallest
        reserved = max(p.peak_reserved_bytes or 0 for p in result.probes if p.batch_size == shown)
        if bound and result.status is Status.FOUND:
            answers[bound] = result.batch_size
        explanation = explain(
            traces.at(shown),
            shown,
            gpu=gpu,
            reserved_bytes=reserved,
        )
        low, high = plausible_interval(result, traces, bounds)
        estimates.append(Estimate(gpu, low, high, result, explanation))
    return estimates
