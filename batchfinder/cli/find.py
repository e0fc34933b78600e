"""``batchfinder find``: from the options of the command line to a result and an exit status."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import click

from batchfinder.cli.ranks import check_job, refusals_told, told_by_rank_0
from batchfinder.cli.searching import search_in_terminal
from batchfinder.errors import UsageError
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.process import WorkerProcess
from batchfinder.probing.workers.process_worker import ProcessWorker
from batchfinder.probing.workers.source import SetupSource
from batchfinder.probing.workers.supervisor import Supervisor
from batchfinder.probing.workers.worker import EstimateOrder
from batchfinder.reporting.terminal import TerminalReporter
from batchfinder.results.accumulation import AccumulationPlan
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.search.bounds import Bounds, check_bounds
from batchfinder.search.head_start import HeadStart
from batchfinder.search.prober import Prober
from batchfinder.training.arguments import parse_arguments
from batchfinder.units import parse_bytes, parse_percentage

MakeProber = Callable[[SetupSource, ProbeOptions], Prober]
"""From what the options say to what tries the sizes."""

# By name, for the worker to import it: it needs torch.
ESTIMATE = "batchfinder.simulation.guess:guess_batch_size"

NOT_ACCUMULATED_WARNING = (
    "the size was found without gradient accumulation, which keeps the gradients of one "
    "micro-batch alive in the next: search with --accumulate"
)


@told_by_rank_0
def find_batch_size(
    target: str,
    *,
    sample: str | None,
    input_spec: str | None,
    pairs: Sequence[str],
    device: str | None,
    memory_limit: str | None,
    headroom: str,
    precision: str,
    optimizer: str | None,
    strategy: str | None,
    mode: str,
    eval_batch_size: int | None,
    accumulate: bool,
    compiled: bool,
    min_batch_size: int,
    max_batch_size: int | None,
    multiple_of: int,
    confirm_steps: int,
    probe_timeout: float | None,
    start_from_estimate: bool,
    global_batch_size: int | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    make_prober: MakeProber | None = None,
) -> int:
    """Run the command; see ``batchfinder find --help`` for the options.

    ``make_prober`` makes the prober; None: one of a worker process, or of all ranks.

    Returns:
        The exit status.

    Raises:
        BatchFinderError: whatever keeps the search from ending well.
    """
    with refusals_told():
        is_rank_0 = check_job(strategy).rank == 0
        check_bounds(min_batch_size, max_batch_size, multiple_of)
        options = ProbeOptions(
            device=device,
            memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
            headroom=parse_percentage(headroom, "--headroom"),
            precision=precision,
            strategy=strategy,
            mode=mode,
            eval_batch_size=eval_batch_size,
            accumulate=accumulate,
            compiled=compiled,
            confirm_steps=confirm_steps,
        )
        if probe_timeout is not None and not 0 < probe_timeout <= threading.TIMEOUT_MAX:
            raise UsageError(
                f"--probe-timeout must be above 0 seconds, not {probe_timeout:g}; leave it out for "
                "a limit by the steps seen"
            )
        if global_batch_size is not None and mode != "train":
            raise UsageError(f"--global-batch-size belongs to training, and --mode is {mode}.")
        if global_batch_size is not None and global_batch_size < 1:
            raise UsageError(f"--global-batch-size must be at least 1, not {global_batch_size}")
        source = SetupSource(target, parse_arguments(pairs), sample, input_spec, optimizer)

    def report(_: Prober, result: BatchSizeResult) -> None:
        if not is_rank_0:
            return
        result = replace(result, mode=mode, eval_batch_size=eval_batch_size)
        result, plan = _planned(result, global_batch_size, accumulate)
        if as_json:
            reporter.finish()
            plan_as_data = {"accumulation_plan": asdict(plan)} if plan else {}
            click.echo(json.dumps({**result.to_dict(), **plan_as_data}, allow_nan=False))
        elif result.status is not Status.FAILED or result.batch_size:
            reporter.answer(result, plan)

    estimate = EstimateOrder(ESTIMATE, (min_batch_size, max_batch_size, multiple_of))
    make_prober = make_prober or partial(
        _worker_prober,
        probe_timeout_seconds=probe_timeout,
        show_output=verbose,
        estimate=estimate if start_from_estimate or options.may_start_from_estimate else None,
    )
    with TerminalReporter(quiet=quiet or not is_rank_0, verbose=verbose) as reporter:
        return search_in_terminal(
            partial(make_prober, source, options),
            reporter,
            report,
            headroom=options.headroom,
            bounds=(min_batch_size, max_batch_size, multiple_of),
            show_probe=lambda _, probe: reporter.probe(probe),
            make_head_start=lambda prober: HeadStart(
                partial(_estimate_of, prober, start_from_estimate),
                is_asked_for=start_from_estimate,
                may_pay=options.may_start_from_estimate,
            ),
        )


def _planned(
    result: BatchSizeResult, global_batch_size: int | None, accumulate: bool
) -> tuple[BatchSizeResult, AccumulationPlan | None]:
    """How to reach the global batch size asked for; a warning if that was not measured."""
    if global_batch_size is None or not result.batch_size:
        return result, None
    plan = result.accumulation_plan(global_batch_size)
    if plan.accumulates and not accumulate:
        result = replace(result, warnings=(*result.warnings, NOT_ACCUMULATED_WARNING))
    return result, plan


def _worker_prober(
    source: SetupSource,
    options: ProbeOptions,
    *,
    probe_timeout_seconds: float | None,
    show_output: bool,
    estimate: EstimateOrder | None,
) -> Prober:
    if options.strategy is None:
        worker = ProcessWorker(
            lambda: WorkerProcess(show_output), source, probe_timeout_seconds=probe_timeout_seconds
        )
        return Supervisor(worker, options, estimate)
    # Not before: the parent of a single worker does without torch.
    from batchfinder.probing.ranks.meeting import open_meeting
    from batchfinder.probing.ranks.prober import RankProber

    return RankProber(
        source,
        options,
        open_meeting(),
        probe_timeout_seconds=probe_timeout_seconds,
        show_output=show_output,
        estimate=estimate,
    )


def _estimate_of(
    prober: Prober, is_asked_for: bool, device: str, budget_bytes: int, bounds: Bounds
) -> tuple[int | None, list[str]]:
    """The estimate that the prober's worker makes beside its steps."""
    if not isinstance(prober, Supervisor):
        return None, []
    return prober.estimate(is_asked_for=is_asked_for)
