"""``compare_strategies()``: the memory and speed that each lever gains for one model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from batchfinder.errors import UsageError, warn_of
from batchfinder.probing.options import ProbeOptions
from batchfinder.search.bounds import Bounds
from batchfinder.simulation.gpus import Gpu, find_gpu
from batchfinder.studies.comparison import Comparison
from batchfinder.studies.comparison_request import ComparisonRequest, comparisons_of
from batchfinder.studies.estimate_strategies import estimate_strategies
from batchfinder.studies.measure_strategies import measure_strategies
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
from batchfinder.units import bytes_if_given


def compare_strategies(
    model: nn.Module | Trainer | TrainingSetup,
    sample: Any = None,
    *,
    gpu: str | Gpu | None = None,
    measure: bool = False,
    strategies: Sequence[str] | None = None,
    world_size: int = 1,
    global_batch_size: int | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerSpec | None = None,
    step: StepFunction | None = None,
    make_batch: MakeBatch | None = None,
    device: str | None = None,
    memory_limit: str | int | None = None,
    headroom: float = 0.05,
    precision: str = "fp32",
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    multiple_of: int = 1,
    batch_dim: int = 0,
) -> Comparison:
    """Compare precision, checkpointing, optimizers and sharding for a model.

    Each strategy is estimated for a GPU that you need not have, in a second or two. Or it is
    measured on your device with the proof of :func:`find_max_batch`. The model is not changed.

    Args:
        model: the module to train. Or a :class:`TrainingSetup`, or a ``transformers.Trainer``.
        sample: one batch of any size, as the DataLoader yields it, with the longest sequences.
        gpu: estimate for this GPU: a name from ``batchfinder gpus``, or a :class:`Gpu`.
        measure: run real training steps on ``device`` instead.
        strategies: levers with ``+`` between them, such as ``"bf16+checkpointing"``: fp32, bf16,
            fp16, pure-bf16, checkpointing, selective-checkpointing, no-checkpointing, the
            optimizers of ``torch.optim``, adamw-fused, adamw-8bit, accumulate, compile, ddp, fsdp.
            Default: each lever alone, and sensible combinations.
        world_size: ranks of the job for ``ddp`` and ``fsdp``.
        global_batch_size: examples of one optimizer step over all ranks. All strategies then
            accumulate gradients, and the fastest one needs the shortest time for this step.
        loss_fn: ``loss_fn(output, batch) -> loss``. Default: inferred from the output.
        optimizer: an instance, a factory ``factory(params)``, or the name of a class of
            ``torch.optim``, for the strategies that set none. Default: AdamW.
        step: ``step(model, batch) -> loss``, in place of forward pass and loss.
        make_batch: ``make_batch(batch_size) -> batch``, in place of repeating the sample.
        device: where to measure. Default: an accelerator if there is one.
        memory_limit: use no more memory than this: bytes, or text such as ``"24GiB"``.
        headroom: fraction of the memory to keep free.
        precision: the precision of the strategies that do not set it.
        min_batch_size: the smallest size to try.
        max_batch_size: the largest size to try.
        multiple_of: only multiples of this are tried.
        batch_dim: index of the batch dimension.

    Returns:
        The comparison. ``largest`` and ``fastest`` are two of its ``rows``.

    Warns:
        BatchFinderWarning: for each of the comparison's ``warnings``.

    Raises:
        UsageError: an argument is invalid, or a strategy is unknown.
        BatchFinderError, Exception: the step fails without any strategy applied.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
        >>> sample = torch.randn(8, 1024), torch.randn(8, 1024)
        >>> result = compare_strategies(model, sample, gpu="t4", strategies=["sgd"])
        >>> [row.strategy.name for row in result.rows]
        ['as it is', 'sgd']
    """
    if (gpu is None) == (not measure):
        raise UsageError('either estimate or measure. Try gpu="rtx3090", or measure=True.')
    setup, warnings = completed(setup_of(model, sample, loss_fn, optimizer, step, make_batch))
    bounds = Bounds.of(min_batch_size, max_batch_size, multiple_of)
    options = ProbeOptions(
        device=device,
        memory_limit=bytes_if_given(memory_limit),
        headroom=headroom,
        precision=precision,
        smallest=bounds.first,
        batch_dim=batch_dim,
    )
    request = ComparisonRequest.of(
        setup,
        options,
        bounds,
        strategies=strategies or (),
        world_size=world_size,
        global_batch_size=global_batch_size,
        is_measured=measure,
    )
    gpus = [] if gpu is None else [find_gpu(gpu)]
    rows = estimate_strategies(request, gpus) if gpus else measure_strategies(request)
    (comparison,) = comparisons_of(request, [*rows], gpus)
    comparison = dataclasses.replace(comparison, warnings=(*warnings, *comparison.warnings))
    warn_of(comparison.warnings)
    return comparison
