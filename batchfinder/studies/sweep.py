"""``sweep_max_batch()``: the largest batch size for each length, or value of another argument."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeAlias

from torch import nn

from batchfinder.errors import UsageError, warn_of
from batchfinder.estimator import estimate_on_gpus
from batchfinder.probing.choose_prober import choose_prober
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.source import SetupSource
from batchfinder.results.probe import peak_at
from batchfinder.search.bounds import Bounds, check_bounds, whole_bounds
from batchfinder.simulation.gpus import Gpu, find_gpu
from batchfinder.studies.size_sweep import SizeSweep
from batchfinder.studies.study import reason_of
from batchfinder.studies.sweep_result import Sweep, SweepRow
from batchfinder.studies.sweep_values import bound, combinations, elements_of
from batchfinder.training.completion import completed
from batchfinder.training.setup import MakeBatch, OptimizerSpec, TrainingSetup, setup_of
from batchfinder.training.target import name_of, refuse_unknown_arguments
from batchfinder.units import parse_bytes

Load: TypeAlias = Callable[[Mapping[str, Any]], TrainingSetup]
"""A function that makes the setup for some values of the swept arguments."""

OnRow: TypeAlias = Callable[[SweepRow], None]


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
    sizes = _ExampleSizes(finder)
    rows: list[SweepRow] = [SweepRow(each) for each in values]
    facts: list[tuple[str, int]] = []
    warnings: list[str] = []
    errors: list[Exception] = []
    for index in _outside_in(rows):
        row = rows[index]
        try:
            setup = load(row.values)
            elements = elements_of(setup, options.batch_dim)
            x = sizes.size_of(row, elements)
            own = source and source.with_arguments(row.values)
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
    told = tuple(dict.fromkeys(warnings))
    return Sweep(tuple(over), device, budget, True, tuple(rows), told)


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
            elements = elements_of(setup, options.batch_dim)
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


def _outside_in(rows: Sequence[SweepRow]) -> list[int]:
    """Return the order to search in: both ends, then the middle of the widest gap each time."""
    lengths = [row.length for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (lengths[i] or 0.0, i))
    done = [len(order) - 1, 0][: len(order)]
    while len(done) < len(order):
        known = sorted(done)
        start, end = max(itertools.pairwise(known), key=lambda gap: gap[1] - gap[0])
        done.append((start + end) // 2)
    return [order[place] for place in done]


class _ExampleSizes:
    """The example size that memory grows with: an example's elements, or else the swept value.

    Some sweeps do not change the batch, such as a sweep over the model's depth. Then every example
    has the same number of elements, so the swept value is used.
    """

    def __init__(self, finder: SizeSweep) -> None:
        self._scaling = finder.scaling
        self._lengths: dict[float, float] = {}  # by the elements of an example
        self._by_length = False

    def size_of(self, row: SweepRow, elements: float) -> float | None:
        """Return the size of a row's examples; None if its values are not positive numbers."""
        if row.length is None or row.length <= 0:
            return None
        if self._lengths.setdefault(elements, row.length) != row.length and not self._by_length:
            self._by_length = True
            self._scaling.rename(self._lengths)
        return row.length if self._by_length else elements
