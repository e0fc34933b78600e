"""Searches with each strategy on a real device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

from batchfinder.errors import reason_of
from batchfinder.probing.choose_prober import choose_prober
from batchfinder.results.probe import peak_at
from batchfinder.search.run import probing, run_search
from batchfinder.simulation.explanation import explain
from batchfinder.simulation.gpus import NO_GPU
from batchfinder.simulation.recordings.guess import head_start_of
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.studies.apply_strategy import applied
from batchfinder.studies.comparison import StrategyRow
from batchfinder.studies.comparison_request import ComparisonRequest
from batchfinder.studies.strategies import Strategy

# The compute capability of an RTX 3090. The size of the model states is the same on every GPU.
_ANY_CAPABILITY = (8, 6)

_NEEDS_RANKS = (
    "not measured: it needs {ranks} processes. Try torchrun --nproc-per-node {ranks} -m "
    "batchfinder find FILE.py:FUNCTION --strategy {name}."
)


def measure_strategies(
    request: ComparisonRequest, on_begin: Callable[[str], None] = lambda _: None
) -> Iterator[list[StrategyRow]]:
    """Search with every strategy on the device. Yield the row of each, in a list, as it ends.

    ``on_begin`` is called as each probe begins, with a text such as ``bf16: trying 64 ...``. The
    lists get the sizes of the model states at the end: a trace leaves memory in this process, which
    on the CPU would count against the limit of the next search.

    Raises:
        Exception: the error of the first strategy, which changes nothing.
    """
    done: list[list[StrategyRow]] = []
    for strategy in request.strategies:
        try:
            row = _measured(request, strategy, on_begin)
        except Exception as error:
            if strategy == request.strategies[0]:
                raise
            row = StrategyRow(strategy, note=reason_of(error))
        done.append([row])
        yield done[-1]
    for rows in done:
        if rows[0].result is not None:
            rows[0] = replace(rows[0], model_state_bytes=_model_states(request, rows[0]))


def _measured(
    request: ComparisonRequest, strategy: Strategy, on_begin: Callable[[str], None]
) -> StrategyRow:
    if strategy.parallel:
        note = _NEEDS_RANKS.format(ranks=request.world_size, name=strategy.parallel)
        return StrategyRow(strategy, note=note, world_size=request.world_size)
    on_probing = probing(strategy.name, on_begin)
    with (
        applied(strategy, request.setup, request.options) as step,
        closing(choose_prober(step.setup, step.options)) as prober,
    ):
        head_start = head_start_of(prober, step.options.confirm_steps)
        result = run_search(prober, request.bounds, on_probing=on_probing, head_start=head_start)
        row = StrategyRow(
            strategy,
            result,
            peak_bytes=peak_at(result.probes, result.batch_size),
            blocks=step.blocks,
            plan=request.plan_of(strategy, result.batch_size),
        )
        # Between sizes that ran, times are a guess, which would decide which strategy is fastest.
        size = row.split.batch_size if row.split else result.batch_size
        if size != result.batch_size:
            on_probing(size, False)
            timed = prober.probe(size, confirm=True)
            row = replace(row, result=replace(result, probes=(*result.probes, timed)))
    return row


def _model_states(request: ComparisonRequest, row: StrategyRow) -> int | None:
    """Return the bytes of parameters, gradients and optimizer states; None if unknown."""
    size = max(row.batch_size, request.bounds.first)
    # The user's model may fail here. The search already has its answer.
    with suppress(Exception), applied(row.strategy, request.setup, request.options) as step:
        traces = StepTraces(step.setup, step.options, _ANY_CAPABILITY).at(size)
        return explain(traces, size, gpu=NO_GPU, reserved_bytes=0).model_state_bytes
    return None
