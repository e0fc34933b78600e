"""Strategies on simulated GPUs. Steps with the same forward and backward passes share traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from batchfinder.errors import reason_of
from batchfinder.estimator import estimate_on_gpus
from batchfinder.simulation.estimate import Estimate
from batchfinder.simulation.gpus import Gpu
from batchfinder.simulation.kernels.attention import ComputeCapability
from batchfinder.simulation.tracing.caches import Caches
from batchfinder.simulation.tracing.data_parallel import Cluster
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.studies.apply_strategy import applied
from batchfinder.studies.checkpointing import is_checkpointed
from batchfinder.studies.comparison import StrategyRow
from batchfinder.studies.comparison_request import ComparisonRequest, warnings_of
from batchfinder.studies.strategies import Strategy

SAVES_NOTHING = "saves nothing here: no less is kept for the backward pass"

# Checkpointing saves nothing if it saves less than this fraction of the bytes per example.
_SAME = 0.001


def estimate_strategies(
    request: ComparisonRequest,
    gpus: Sequence[Gpu],
    on_begin: Callable[[str], None] = lambda _: None,
) -> Iterator[list[StrategyRow]]:
    """Estimate every strategy on each GPU. Yield its rows, one for each GPU, as it ends.

    ``on_begin`` is called as each strategy begins, with a text such as ``tracing bf16 ...``.

    Raises:
        Exception: the error of the first strategy, which changes nothing.
    """
    done: list[list[StrategyRow]] = []
    traced: dict[Strategy, list[tuple[Strategy, StepTraces]]] = {}
    caches = Caches(request.setup.model)
    checks = not is_checkpointed(request.setup)  # else the row without checkpointing comes later
    for strategy in request.strategies:
        on_begin(f"tracing {strategy.name} ...")
        try:
            estimates, blocks = _estimates(request, strategy, gpus, traced, caches)
        except Exception as error:
            if not done:
                raise
            rows = [StrategyRow(strategy, note=reason_of(error)) for _ in gpus]
        else:
            known = warnings_of(done)
            rows = []
            for estimate in estimates:
                new = (text for text in estimate.result.warnings if text not in known)
                note = next(new, "") if done else ""
                rows.append(_row(request, strategy, estimate, blocks, note))
            if checks:
                rows = [_checked(row, [of[i] for of in done]) for i, row in enumerate(rows)]
        done.append(rows)
        yield rows


def _estimates(
    request: ComparisonRequest,
    strategy: Strategy,
    gpus: Sequence[Gpu],
    traced: dict[Strategy, list[tuple[Strategy, StepTraces]]],
    caches: Caches,
) -> tuple[list[Estimate], str]:
    ranks = request.ranks_of(strategy)
    cluster = Cluster(strategy.parallel, ranks) if strategy.parallel else None
    kernels = _with_same_kernels(strategy, gpus)
    passes = dataclasses.replace(kernels, optimizer=None, accumulate=False, parallel=None)
    same_passes = traced.setdefault(passes, [])
    with applied(strategy, request.setup, request.options) as step:

        def make_traces(capability: ComputeCapability) -> StepTraces:
            known = [(of, some) for of, some in same_passes if some.hold_for(capability)]
            traces = next((some for of, some in known if of == kernels), None)
            if traces is None:
                given = (step.setup, step.options, capability, cluster)
                traces = StepTraces(*given, known[0][1] if known else None, caches)
                same_passes.append((kernels, traces))
            return traces

        estimates = estimate_on_gpus(
            step.setup,
            gpus,
            step.options,
            bounds=request.bounds,
            cluster=cluster,
            make_traces=make_traces,
        )
    return estimates, step.blocks


def _with_same_kernels(strategy: Strategy, gpus: Sequence[Gpu]) -> Strategy:
    """Return the strategy whose steps allocate the same.

    Since Ampere, fp16 and bf16 run the same kernels, and a GradScaler needs only a few numbers.
    """
    is_ampere = all(gpu.compute_capability >= (8, 0) for gpu in gpus)
    is_bf16 = strategy.precision == "fp16" and is_ampere
    return dataclasses.replace(strategy, precision="bf16") if is_bf16 else strategy


def _row(
    request: ComparisonRequest, strategy: Strategy, estimate: Estimate, blocks: str, note: str
) -> StrategyRow:
    return StrategyRow(
        strategy,
        estimate.result,
        estimate.explanation.terms,
        estimate.peak_bytes,
        estimate.explanation.model_state_bytes,
        blocks,
        note,
        request.ranks_of(strategy),
        request.plan_of(strategy, estimate.batch_size),
    )


def _checked(row: StrategyRow, before: Sequence[StrategyRow]) -> StrategyRow:
    """Add a note to a row if its checkpointing saves nothing."""
    plain = dataclasses.replace(row.strategy, checkpointing=None)
    other = next((known for known in before if known.strategy == plain), None)
    if not row.strategy.checkpointing or other is None or row.note:
        return row
    grown, known = row.per_sample_bytes, other.per_sample_bytes
    if grown is None or known is None or grown < known * (1 - _SAME):
        return row
    return dataclasses.replace(row, note=SAVES_NOTHING)
