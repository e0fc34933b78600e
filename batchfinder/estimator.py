"""``estimate_max_batch()``: the answer of ``find_max_batch()`` for a GPU that you do not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from batchfinder.errors import warn_of
from batchfinder.probing.devices.allocator.caching import AllocatorSettings
from batchfinder.probing.options import ProbeOptions
from batchfinder.results.result import Status
from batchfinder.search.bounds import ALL_SIZES, Bounds
from batchfinder.simulation.estimate import Estimate, PeakEstimate
from batchfinder.simulation.explanation import explain
from batchfinder.simulation.gpus import Gpu, find_gpu, of_rank
from batchfinder.simulation.kernels.attention import ComputeCapability
from batchfinder.simulation.prober import SimulatedProber
from batchfinder.simulation.simulated_search import (
    expected_size,
    plausible_interval,
    search_on_paper,
)
from batchfinder.simulation.tracing.data_parallel import Cluster
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.training.complete_setup import completed
from batchfinder.training.setup import (
    LossFunction,
    MakeBatch,
    OptimizerSpec,
    StepFunction,
    Trainer,
    TrainingSetup,
    setup_of,
)
from batchfinder.units import bytes_if_given, positive


def estimate_max_batch(
    model: nn.Module | Trainer | TrainingSetup,
    sample: Any = None,
    *,
    gpu: str | Gpu,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerSpec | None = None,
    step: StepFunction | None = None,
    make_batch: MakeBatch | None = None,
    loader: Any = None,
    memory_limit: str | int | None = None,
    headroom: float = 0.05,
    precision: str = "fp32",
    accumulate: bool = False,
    mode: str = "train",
    eval_batch_size: int | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    multiple_of: int = 1,
    batch_dim: int = 0,
    expandable_segments: bool = False,
) -> Estimate:
    """Estimate the largest batch size that trains on a GPU, without that GPU or any other.

    The training step runs on tensors without data, and its allocations are replayed in a model of
    the CUDA caching allocator. Model, optimizer, sample and random generators are not changed.

    Args:
        model: the module to train. Or a :class:`TrainingSetup` in place of all arguments up to
            ``loader``, or a ``transformers.Trainer``, which supplies those not given.
        sample: one batch of any size, as the DataLoader yields it, with the longest sequences.
        gpu: a name from ``batchfinder gpus``, or a :class:`Gpu`. Use :func:`find_gpu` and
            ``dataclasses.replace`` to change a known one.
        loss_fn: ``loss_fn(output, batch) -> loss``. Default: inferred from the output.
        optimizer: an instance, a factory ``factory(params)``, or the name of a class of
            ``torch.optim``. Default: AdamW.
        step: ``step(model, batch) -> loss``, in place of forward pass and loss, or
            ``step(model, batch) -> None`` for a complete training step.
        make_batch: ``make_batch(batch_size) -> batch``, in place of repeating the sample; or
            ``make_batch(batch_size, step)``, where step 0 gets the longest batch.
        loader: your DataLoader, a data set, ``(data set, collate function)`` or a
            LightningDataModule, in place of the sample: a confirmation trains on batches drawn from
            it, the longest first and last. The loader itself is not used up or changed.
        memory_limit: memory of the GPU to use at most: bytes, or text such as ``"24GiB"``.
        headroom: fraction of the memory to keep free, from 0 to below 1.
        precision: ``"fp32"``, or ``"bf16"`` / ``"fp16"`` for autocast (fp16 with a GradScaler).
        accumulate: simulate gradient accumulation.
        mode: ``"eval"`` or ``"inference"`` for forward passes without training.
        eval_batch_size: also simulate a validation after every step, with batches of this size.
        min_batch_size: the smallest size to try.
        max_batch_size: the largest size to try.
        multiple_of: only multiples of this are tried.
        batch_dim: index of the batch dimension.
        expandable_segments: simulate ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.

    Returns:
        The estimate: ``batch_size`` (0 if nothing fits), its plausible range ``low`` to ``high``,
        ``peak_bytes``, and the terms of the peak in ``explanation``.

    Warns:
        BatchFinderWarning: for each of the result's ``warnings``.

    Raises:
        UsageError: an argument is invalid, or the GPU is unknown.
        SampleError: there is no usable example batch.
        DeviceError: the process overhead leaves no memory for training.
        StepError: the step cannot run without data; the message says where.
        Exception: whatever the model or one of the functions raises.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1024, 1024)
        >>> sample = torch.randn(8, 1024), torch.randn(8, 1024)
        >>> estimate_max_batch(model, sample, gpu="rtx3090", max_batch_size=64).batch_size
        64
    """
    setup, warnings = completed(
        setup_of(model, sample, loss_fn, optimizer, step, make_batch, loader)
    )
    options = ProbeOptions(
        memory_limit=bytes_if_given(memory_limit),
        headroom=headroom,
        precision=precision,
        accumulate=accumulate,
        batch_dim=batch_dim,
        mode=mode,
        eval_batch_size=eval_batch_size,
    )
    (estimate,) = estimate_on_gpus(
        setup,
        [find_gpu(gpu)],
        options,
        AllocatorSettings(expandable_segments=expandable_segments),
        Bounds.of(min_batch_size, max_batch_size, multiple_of),
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
    loader: Any = None,
    headroom: float = 0.0,
    precision: str = "fp32",
    accumulate: bool = False,
    mode: str = "train",
    eval_batch_size: int | None = None,
    batch_dim: int = 0,
    expandable_segments: bool = False,
) -> PeakEstimate:
    """Estimate the peak memory of a training step at one batch size.

    Args:
        model: the module to train. Or a :class:`TrainingSetup` in place of all arguments up to
            ``loader``, or a ``transformers.Trainer``, which supplies those not given.
        sample: one batch of any size, as the DataLoader yields it, with the longest sequences.
        batch_size: examples per forward/backward pass.
        gpu: a name from ``batchfinder gpus``, or a :class:`Gpu`. Use :func:`find_gpu` and
            ``dataclasses.replace`` to change a known one.
        loss_fn: ``loss_fn(output, batch) -> loss``. Default: inferred from the output.
        optimizer: an instance, a factory ``factory(params)``, or the name of a class of
            ``torch.optim``. Default: AdamW.
        step: ``step(model, batch) -> loss``, or ``-> None`` for a complete training step.
        make_batch: ``make_batch(batch_size) -> batch``, in place of repeating the sample; or
            ``make_batch(batch_size, step)``, where step 0 gets the longest batch.
        loader: your DataLoader, a data set, ``(data set, collate function)`` or a
            LightningDataModule, in place of the sample: a confirmation trains on batches drawn from
            it, the longest first and last. The loader itself is not used up or changed.
        headroom: fraction of the memory that must stay free for the size to fit.
        precision: ``"fp32"``, or ``"bf16"`` / ``"fp16"`` for autocast (fp16 with a GradScaler).
        accumulate: simulate gradient accumulation.
        mode: ``"eval"`` or ``"inference"`` for forward passes without training.
        eval_batch_size: also simulate a validation with batches of this size.
        batch_dim: index of the batch dimension.
        expandable_segments: simulate ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.

    Returns:
        The estimate: ``fits``, ``peak_bytes`` of the whole process, and the terms of the peak in
        ``explanation``.

    Warns:
        BatchFinderWarning: for each of the estimate's ``warnings``.

    Raises:
        Exception: as :func:`estimate_max_batch`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1024, 1024)
        >>> sample = torch.randn(8, 1024), torch.randn(8, 1024)
        >>> estimate_peak_memory(model, sample, batch_size=64, gpu="t4").fits
        True
    """
    batch_size = positive("batch_size", batch_size)
    setup, warnings = completed(
        setup_of(model, sample, loss_fn, optimizer, step, make_batch, loader)
    )
    options = ProbeOptions(
        headroom=headroom,
        precision=precision,
        accumulate=accumulate,
        batch_dim=batch_dim,
        mode=mode,
        eval_batch_size=eval_batch_size,
    )
    device = find_gpu(gpu)
    settings = AllocatorSettings(expandable_segments=expandable_segments)
    traces = StepTraces(setup, options, device.compute_capability)
    prober = SimulatedProber(traces, device, options, settings)
    traces.at(batch_size)
    traces.hold_at(batch_size)
    run = prober.replay(batch_size)
    fits = run.trains
    if not fits:
        # Replay with ample memory: report the peak that the step needs, not where it failed.
        roomy = dataclasses.replace(device, total_bytes=1 << 50)
        run = SimulatedProber(traces, roomy, options, settings).replay(batch_size)
    warn_of(warnings := [*warnings, *prober.warnings])
    reserved = run.peak_reserved_bytes
    explanation = explain(traces.at(batch_size), batch_size, gpu=device, reserved_bytes=reserved)
    return PeakEstimate(
        device,
        batch_size,
        fits,
        run.peak_allocated_bytes,
        reserved,
        prober.budget_bytes,
        explanation,
        tuple(warnings),
    )


def estimate_on_gpus(
    setup: TrainingSetup,
    gpus: Sequence[Gpu],
    options: ProbeOptions,
    settings: AllocatorSettings | None = None,
    bounds: Bounds = ALL_SIZES,
    *,
    cluster: Cluster | None = None,
    make_traces: Callable[[ComputeCapability], StepTraces] | None = None,
) -> list[Estimate]:
    """Estimate the largest batch size on several GPUs.

    GPUs with the same kernels share their traces. With a cluster, each GPU is one rank of that
    data-parallel job, and NCCL uses some of its memory. ``make_traces`` replaces the traces of the
    setup and the options.

    Raises:
        UsageError, SampleError, DeviceError, StepError, Exception: as ``estimate_max_batch``.
    """
    make_traces = make_traces or partial(StepTraces, setup, options, cluster=cluster)
    made: list[StepTraces] = []
    estimates: list[Estimate] = []
    answers: dict[int, int] = {}
    for gpu in [of_rank(gpu, cluster.world_size) if cluster else gpu for gpu in gpus]:
        traces = next((some for some in made if some.hold_for(gpu.compute_capability)), None)
        if traces is None:
            traces = make_traces(gpu.compute_capability)
            made.append(traces)
        prober = SimulatedProber(traces, gpu, options, settings)
        bound = traces.upper_bound(prober.budget_bytes)
        result = search_on_paper(prober, bounds, expected_size(bound, answers))
        warnings = filter(None, (*result.warnings, setup.warning_of(result.batch_size)))
        result = dataclasses.replace(result, warnings=tuple(warnings))
        shown = result.batch_size or bounds.first
        reserved = max(p.peak_reserved_bytes or 0 for p in result.probes if p.batch_size == shown)
        if bound and result.status is Status.FOUND:
            answers[bound] = result.batch_size
        explanation = explain(traces.at(shown), shown, gpu=gpu, reserved_bytes=reserved)
        low, high = plausible_interval(result, traces, bounds)
        estimates.append(Estimate(gpu, low, high, result, explanation))
    return estimates
