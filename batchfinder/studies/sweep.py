"""``sweep_max_batch()``: the largest batch size for each length, or value of another argument."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from batchfinder.errors import warn_of
from batchfinder.estimator import estimate_on_gpus
from batchfinder.probing.choose_prober import choose_prober
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.results.probe import peak_at
from batchfinder.search.bounds import Bounds
from batchfinder.search.run import probing
from batchfinder.simulation.estimate import Estimate
from batchfinder.simulation.gpus import Gpu, find_gpu
from batchfinder.studies.size_sweep import SizeSweep
from batchfinder.studies.sweep_result import Sweep, SweepRow
from batchfinder.studies.sweep_values import (
    ExampleSizes,
    bound,
    combinations,
    elements_of,
    mixed_percent,
    note_of,
    outside_in,
)
from batchfinder.training.complete_setup import completed
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import MakeBatch, OptimizerSpec, TrainingSetup, setup_of
from batchfinder.training.target import name_of, refuse_unknown_arguments
from batchfinder.units import bytes_if_given

Load: TypeAlias = Callable[[Mapping[str, Any]], TrainingSetup]
"""A function that makes the setup for some values of the swept arguments."""

OnBegin: TypeAlias = Callable[[str], None]
"""Called with each piece of work as it begins, such as ``seq_len=512: trying 64 ...``."""

Progress: TypeAlias = tuple[SweepRow | None, list[Sweep]]
"""A row that has ended, and the sweeps so far: one for each device, none before one is known. The
row is None if only the sweeps have changed."""


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
    on_row: Callable[[SweepRow], None] = lambda _: None,
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
    if isinstance(build, nn.Module | TrainingSetup):
        fixed = setup_of(build)
        fixed = dataclasses.replace(fixed, make_batch=make_batch or fixed.make_batch)
        made_for: Callable[..., Any] = lambda **values: bound(fixed, values)  # noqa: E731
    else:
        refuse_unknown_arguments(name_of(build), over, build)
        made_for = build

    def load(values: Mapping[str, Any]) -> TrainingSetup:
        made = made_for(**values)
        setup = setup_of(*(made if isinstance(made, tuple) else (made,)))
        if optimizer is not None:
            setup = dataclasses.replace(setup, optimizer=optimizer)
        return completed(setup)[0]

    bounds = Bounds.of(min_batch_size, max_batch_size, multiple_of)
    options = ProbeOptions(
        device=device,
        memory_limit=bytes_if_given(memory_limit),
        headroom=headroom,
        precision=precision,
        accumulate=accumulate,
        smallest=bounds.first,
    )
    if gpu is None:
        progress = sweep_on_device(load, over, options, bounds)
    else:
        progress = sweep_on_gpus(load, over, [find_gpu(gpu)], options, bounds)
    sweeps: list[Sweep] = []
    for row, so_far in progress:
        sweeps = so_far
        if row is not None:
            on_row(row)
    (sweep,) = sweeps
    warn_of(sweep.warnings)
    return sweep


def sweep_on_device(
    load: Load,
    over: Mapping[str, Sequence[Any]],
    options: ProbeOptions,
    bounds: Bounds,
    source: SetupSource | None = None,
    on_begin: OnBegin = lambda _: None,
) -> Iterator[Progress]:
    """Search on the device: the largest and the smallest examples first, then those between.

    If another process can load the setups, ``source`` says how, but for the swept values.

    Raises:
        Exception: no value can be trained on; the error of the first one tried.
    """
    values = combinations(over)
    finder = SizeSweep(bounds, options.confirm_steps)
    sizes = ExampleSizes(finder)
    parts: dict[int, tuple[BatchMaker, int]] = {}
    rows: dict[int, SweepRow] = {}
    facts: list[tuple[str, int]] = []
    warnings: list[str] = []
    errors: list[Exception] = []

    def so_far() -> list[Sweep]:
        ended = tuple(rows[index] for index in sorted(rows))
        return [_sweep(over, *facts[0], True, ended, warnings)] if facts else []

    def searched(row: SweepRow) -> tuple[SweepRow, BatchMaker]:
        gc.collect()  # on the CPU, the model of the value before counts against the limit
        on_begin(f"{row.name}: loading ...")
        setup = load(row.values)
        batches = BatchMaker.of(setup, options.batch_dim)
        elements = elements_of(batches)
        x = sizes.size_of(row, elements)
        own = source and source.with_arguments(row.values)
        with closing(choose_prober(setup, options, own)) as prober:
            answer = finder.find(prober, x, probing(row.name, on_begin))
            facts.append((prober.device, prober.budget_bytes))  # its first probe may lower it
        warnings.extend(answer.warnings)
        peak = peak_at(answer.probes, answer.batch_size)
        slope = None if x is None else finder.scaling.per_sample_bytes.get(x)
        found = (answer.batch_size, tuple(answer.probes), elements, peak, slope)
        return SweepRow(row.values, *found), batches

    for index in outside_in([SweepRow(each) for each in values]):
        row = SweepRow(values[index])
        try:
            rows[index], batches = searched(row)
        except Exception as error:  # noqa: BLE001 - the user's code may fail for one value only
            errors.append(error)
            rows[index] = SweepRow(row.values, note=note_of(error, is_first=not rows))
        else:
            if rows[index].batch_size:
                parts[index] = batches, rows[index].batch_size
        yield rows[index], so_far()
    if len(errors) == len(rows):
        raise errors[0]
    (sweep,) = so_far()
    if len(parts) < 2 or not sweep.fitting.max_tokens:
        return
    gc.collect()
    of_longest = partial(load, values[next(iter(parts))])
    percent, warning = mixed_percent(of_longest, [*parts.values()], options, on_begin)
    told = (*sweep.warnings, *filter(None, [warning]))
    yield None, [dataclasses.replace(sweep, mixed_percent=percent, warnings=told)]


def sweep_on_gpus(
    load: Load,
    over: Mapping[str, Sequence[Any]],
    gpus: Sequence[Gpu],
    options: ProbeOptions,
    bounds: Bounds,
    on_begin: OnBegin = lambda _: None,
) -> Iterator[Progress]:
    """Estimate every value on each GPU.

    Raises:
        Exception: no value can be trained on; the error of the first one.
    """
    rows: list[tuple[SweepRow, ...]] = [() for _ in gpus]
    budgets: list[int] = []
    warnings: list[str] = []
    errors: list[Exception] = []

    def so_far() -> list[Sweep]:
        return [
            _sweep(over, gpu.name, budget, False, of_gpu, warnings)
            for gpu, budget, of_gpu in zip(gpus, budgets, rows, strict=bool(budgets))
        ]

    for values in combinations(over):
        on_begin(f"{SweepRow(values).name}: tracing ...")
        try:
            setup = load(values)
            elements = elements_of(BatchMaker.of(setup, options.batch_dim))
            estimates = estimate_on_gpus(setup, gpus, options, bounds=bounds)
        except Exception as error:  # noqa: BLE001 - the user's code may fail for one value only
            errors.append(error)
            row = SweepRow(values, note=note_of(error, is_first=not rows[0]))
            rows = [(*of_gpu, row) for of_gpu in rows]
        else:
            budgets = [estimate.result.budget_bytes for estimate in estimates]
            warnings += [text for estimate in estimates for text in estimate.result.warnings]
            rows = [
                (*of_gpu, _estimated(values, elements, estimate))
                for of_gpu, estimate in zip(rows, estimates, strict=True)
            ]
        yield rows[0][-1], so_far()
    if len(errors) == len(rows[0]):
        raise errors[0]


def _estimated(values: Mapping[str, Any], elements: float, estimate: Estimate) -> SweepRow:
    result, model = estimate.result, estimate.result.memory_model
    return SweepRow(
        values,
        result.batch_size,
        result.probes,
        elements,
        estimate.peak_bytes if result.batch_size else None,
        model.per_sample_bytes if model else None,
    )


def _sweep(
    over: Mapping[str, Sequence[Any]],
    device: str,
    budget_bytes: int,
    is_measured: bool,
    rows: tuple[SweepRow, ...],
    warnings: Sequence[str],
) -> Sweep:
    """Make a sweep of the rows that have ended."""
    sweep = Sweep(tuple(over), device, budget_bytes, is_measured, rows)
    told = dict.fromkeys(filter(None, [*warnings, sweep.why_no_max_tokens]))
    return dataclasses.replace(sweep, warnings=tuple(told))
