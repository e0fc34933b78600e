"""``sweep_max_batch()``: the largest batch size for each length, or value of another argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeAlias

from torch import nn

from batchfinder.errors import UsageError, warn_of
from batchfinder.estimator import estimate_on_gpus
from batchfinder.probing.choose_prober import choose_prober
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.source import SetupSource
from batchfinder.results.probe import Outcome, peak_at
from batchfinder.search.bounds import Bounds, check_bounds, whole_bounds
from batchfinder.simulation.gpus import Gpu, find_gpu
from batchfinder.studies.size_sweep import SizeSweep
from batchfinder.studies.study import reason_of
from batchfinder.studies.sweep_result import Sweep, SweepRow
from batchfinder.studies.sweep_values import (
    ExampleSizes,
    MixedBatches,
    bound,
    combinations,
    elements_of,
    outside_in,
)
from batchfinder.training.completion import completed
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import MakeBatch, OptimizerSpec, TrainingSetup, setup_of
from batchfinder.training.target import name_of, refuse_unknown_arguments
from batchfinder.units import parse_bytes

Load: TypeAlias = Callable[[Mapping[str, Any]], TrainingSetup]
"""A function that makes the setup for some values of the swept arguments."""

OnRow: TypeAlias = Callable[[SweepRow], None]

# Percentages of the batch sizes tried for a training that mixes the lengths. At 100, a small
# transformer ran out of memory within 35 shuffled steps: other lengths leave other gaps.
MIXED_PERCENTAGES = (100, 95, 90, 85, 80, 70, 60, 50)

MIXED_LESS = (
    "a training that mixes the lengths fragments the allocator: steps of all lengths in turn were "
    "confirmed at {} % of the sizes in the table, which the lines to paste have"
)
MIXED_NONE = (
    "steps of all lengths in turn ran out of memory even at half of the sizes in the table. Try "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or train on one length only"
)


def sweep_max_batch(
    build: Callable[..., Any] | nn.Module | TrainingSetup,
    over: Mapping[str, Sequence[Any]],
    *,
    make_batch: MakeBatch | None = None,
    optimizer: OptimizerSpec | None = None,
    gpu: str | Gpu | None = None,
    device: str | None = None,
    memory_limit: str | int | None = None,
    headroom: float = 0.05,
    precision: str = "fp32",
    accumulate: bool = False,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    multiple_of: int = 1,
    on_row: OnRow = lambda _: None,
) -> Sweep:
    """Find the largest batch size for each value of one or two arguments, such as the length.

    The memory at one value predicts the batch size for the others, so eight lengths need about as
    many steps as three searches. Every size is confirmed by real steps, as by
    :func:`find_max_batch`, unless ``gpu`` asks for estimates.

    Args:
        build: a function that takes the swept arguments by keyword and returns the model,
            ``(model, sample)`` or a :class:`TrainingSetup`. Or one of these, if ``make_batch``
            takes them.
        over: the values of each argument, by its name; two arguments are swept in all pairs.
        make_batch: ``make_batch(batch_size, NAME=value) -> batch``.
        optimizer: an instance, a factory, or a name of ``torch.optim``. Default: AdamW.
        gpu: estimate for this GPU, which you need not have.
        device: where to train. Default: an accelerator if there is one.
        memory_limit: use no more memory than this: bytes, or text such as ``"24GiB"``.
        headroom: fraction of the memory to keep free.
        precision: ``"fp32"``, or ``"bf16"`` / ``"fp16"`` for autocast.
        accumulate: train with gradient accumulation.
        min_batch_size: the smallest size to try.
        max_batch_size: the largest size to try.
        multiple_of: only multiples of this are tried.
        on_row: called with each row as it ends.

    Returns:
        The sweep: ``rows``, ``max_tokens`` and ``buckets``.

    Warns:
        BatchFinderWarning: for each of the sweep's ``warnings``.

    Raises:
        UsageError: an argument is invalid, or no function takes a swept one.
        BatchFinderError, Exception: no value can be trained on; the error of the first value.

    Example:
        >>> import torch
        >>> def build(seq_len):
        ...     return torch.nn.Linear(8, 8), torch.randn(2, seq_len, 8)
        >>> sweep = sweep_max_batch(build, {"seq_len": [16, 32]}, gpu="t4", max_batch_size=64)
        >>> [(row.values["seq_len"], row.batch_size) for row in sweep.rows]
        [(16, 64), (32, 64)]
    """

    def complete(returned: Any) -> TrainingSetup:
        given = returned if isinstance(returned, tuple) else (returned,)
        setup = setup_of(*given)
        if optimizer is not None:
            setup = dataclasses.replace(setup, optimizer=optimizer)
        return completed(setup)[0]

    if isinstance(build, nn.Module | TrainingSetup):
        fixed = build if isinstance(build, TrainingSetup) else TrainingSetup(build)
        setup = dataclasses.replace(fixed, make_batch=make_batch or fixed.make_batch)
        load: Load = lambda values: complete(bound(setup, values))  # noqa: E731
    else:
        refuse_unknown_arguments(name_of(build), over, build)
        function = build
        load = lambda values: complete(function(**values))  # noqa: E731
    bounds = whole_bounds(min_batch_size, max_batch_size, multiple_of)
    options = ProbeOptions(
        device=device,
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        headroom=headroom,
        precision=precision,
        accumulate=accumulate,
        smallest=check_bounds(*bounds)[0],
    )
    if gpu is None:
        sweep = sweep_on_device(load, over, options, bounds, on_row)
    else:
        gpus = [find_gpu(gpu) if isinstance(gpu, str) else gpu]
        (sweep,) = sweep_on_gpus(load, over, gpus, options, bounds, on_row)
    warn_of(sweep.warnings)
    return sweep


def sweep_on_device(
    load: Load,
    over: Mapping[str, Sequence[Any]],
    options: ProbeOptions,
    bounds: Bounds,
    on_row: OnRow = lambda _: None,
    source: SetupSource | None = None,
) -> Sweep:
    """Search on the device: the largest and the smallest examples first, then those between.

    If another process can load the setups, ``source`` says how, but for the swept values.

    Raises:
        Exception: no value can be trained on; the error of the first one tried.
    """
    values = combinations(over)
    finder = SizeSweep(bounds, options.confirm_steps)
    batches: dict[int, BatchMaker] = {}
    longest: TrainingSetup | None = None
    sizes = ExampleSizes(finder)
    rows: list[SweepRow] = [SweepRow(each) for each in values]
    facts: list[tuple[str, int]] = []
    warnings: list[str] = []
    errors: list[Exception] = []
    order = outside_in(rows)
    for index in order:
        row = rows[index]
        try:
            setup = load(row.values)
            batches[index] = BatchMaker.of(setup, options.batch_dim)
            elements = elements_of(batches[index])
            x = sizes.size_of(row, elements)
            own = source and source.with_arguments(row.values)
            longest = longest or setup
            with closing(choose_prober(setup, options, own)) as prober:
                facts.append((prober.device, prober.budget_bytes))
                answer = finder.find(prober, x)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code may fail for one value only
            errors.append(error)
            rows[index] = SweepRow(row.values, note=reason_of(error))
            on_row(rows[index])
            continue
        warnings += answer.warnings
        slope = None if x is None else finder.scaling.per_sample_bytes.get(x)
        rows[index] = SweepRow(
            row.values,
            answer.batch_size,
            tuple(answer.probes),
            elements,
            peak_at(answer.probes, answer.batch_size),
            slope,
        )
        on_row(rows[index])
    if len(errors) == len(rows):
        raise errors[0]
    device, budget = facts[0]
    sweep = Sweep(tuple(over), device, budget, True, tuple(rows))
    if sweep.max_tokens is not None and len(rows) > 1:
        parts = [(batches[index], rows[index].batch_size) for index in order]
        assert longest is not None
        percent = _mixed_percent(longest, MixedBatches(parts), options)
        if percent == 0:
            warnings.append(MIXED_NONE)
        elif percent and percent < max(MIXED_PERCENTAGES):
            warnings.append(MIXED_LESS.format(percent))
        sweep = dataclasses.replace(sweep, mixed_percent=percent)
    return dataclasses.replace(sweep, warnings=tuple(dict.fromkeys(warnings)))


def _mixed_percent(
    longest: TrainingSetup, mixed: MixedBatches, options: ProbeOptions
) -> int | None:
    """Return the percentage of the batch sizes at which steps of all lengths run in turn.

    Args:
        longest: the setup of the longest examples, whose model trains on all.
        mixed: makes the batches.
        options: the options of the search.

    Returns:
        One of ``MIXED_PERCENTAGES``; 0 if none fits; None if the model of the longest examples does
        not train on the others.
    """
    setup = dataclasses.replace(longest, sample=None, make_batch=mixed)
    options = dataclasses.replace(options, smallest=1)
    with closing(choose_prober(setup, options)) as prober:
        for percent in MIXED_PERCENTAGES:
            try:
                outcome = prober.probe(percent, confirm=True).outcome
            except Exception:  # noqa: BLE001 - the model may be made for one length
                return None
            if outcome is Outcome.FITS:
                return percent
    return 0


def sweep_on_gpus(
    load: Load,
    over: Mapping[str, Sequence[Any]],
    gpus: Sequence[Gpu],
    options: ProbeOptions,
    bounds: Bounds,
    on_row: OnRow = lambda _: None,
) -> list[Sweep]:
    """Estimate every value on each GPU.

    Raises:
        Exception: no value can be trained on; the error of the first one.
    """
    rows: list[list[SweepRow]] = [[] for _ in gpus]
    budgets = [0] * len(gpus)
    warnings: list[str] = []
    errors: list[Exception] = []
    for values in combinations(over):
        try:
            setup = load(values)
            elements = elements_of(BatchMaker.of(setup, options.batch_dim))
            estimates = estimate_on_gpus(setup, gpus, options, bounds=bounds)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's code may fail for one value only
            errors.append(error)
            for of_gpu in rows:
                of_gpu.append(SweepRow(values, note=reason_of(error)))
            on_row(rows[0][-1])
            continue
        for index, estimate in enumerate(estimates):
            result, model = estimate.result, estimate.result.memory_model
            warnings += result.warnings
            budgets[index] = result.budget_bytes
            rows[index].append(
                SweepRow(
                    values,
                    result.batch_size,
                    result.probes,
                    elements,
                    estimate.peak_bytes if result.batch_size else None,
                    model.per_sample_bytes if model else None,
                )
            )
        on_row(rows[0][-1])
    if len(errors) == len(rows[0]):
        raise errors[0]
    told = tuple(dict.fromkeys(warnings))
    return [
        Sweep(tuple(over), gpu.name, budget, False, tuple(of_gpu), told)
        for gpu, budget, of_gpu in zip(gpus, budgets, rows, strict=True)
    ]
