"""``batchfinder find``: from the options of the command line to a result and an exit status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import click

from batchfinder.cli.output import deliver
from batchfinder.cli.ranks import check_job, refusals_told, told_by_rank_0
from batchfinder.cli.remembering import SearchMemory
from batchfinder.cli.request import request_of
from batchfinder.cli.searching import search_in_terminal
from batchfinder.cli.studies.on_data import loader_rate, noise_scale_on_data
from batchfinder.errors import UsageError
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.process import WorkerProcess
from batchfinder.probing.workers.process_worker import ProcessWorker
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.probing.workers.supervisor import Supervisor
from batchfinder.probing.workers.worker import EstimateOrder
from batchfinder.reporting.global_batch import noise_line
from batchfinder.reporting.page.page import check_report
from batchfinder.reporting.progress import TerminalReporter
from batchfinder.results.accumulation import AccumulationPlan
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.search.bounds import Bounds
from batchfinder.search.deadline import deadline_in
from batchfinder.search.remarks import loader_remarks
from batchfinder.simulation.recordings.guess import head_start_of
from batchfinder.training.user_module import check_target
from batchfinder.units import check_seconds, positive

MakeProber = Callable[[SetupSource, ProbeOptions], Supervisor]
"""``make_prober(source, options)`` makes the prober that the options describe."""

# A name, because only the worker imports it: it needs torch.
ESTIMATE = "batchfinder.simulation.starting_estimate:starting_estimate"

NOISE_NEEDS_DATA = (
    "--noise-scale compares gradients of different examples in one process, and only --loader "
    "gives it some. Try --loader FILE.py:FUNCTION, without --strategy."
)
NOT_ACCUMULATED_WARNING = (
    "the size was found without gradient accumulation, which keeps the gradients of one "
    "micro-batch alive in the next: search with --accumulate"
)


@told_by_rank_0
def find_batch_size(
    target: str,
    *,
    strategy: str | None,
    throughput: bool,
    probe_timeout: float | None,
    start_from_estimate: bool,
    global_batch_size: int | None,
    noise_scale: bool,
    time_limit: float | None,
    no_cache: bool,
    as_json: bool,
    report: str | None,
    chart: bool,
    quiet: bool,
    verbose: bool,
    make_prober: MakeProber | None = None,
    **shared: Any,
) -> int:
    """Run ``batchfinder find`` and return the exit status.

    ``make_prober`` makes the prober. Default: one with a worker process, or one for all ranks.
    """
    with refusals_told():
        check_report(report)
        is_rank_0 = check_job(strategy).rank == 0
        request = request_of(target, {**shared, "strategy": strategy})
        source, options, bounds = request.source, request.options, request.bounds
        check_seconds("--probe-timeout", probe_timeout)
        has_no_data = noise_scale and not (source.loader and strategy is None)
        _check_plan(global_batch_size, options.mode, has_no_data)
        deadline = deadline_in(time_limit)
        if deadline is not None and strategy is not None:
            raise UsageError(
                "--time-limit is for one process, as the clocks of ranks differ. Try without it."
            )
    facts = {"options": asdict(options), "source": source.to_dict(), "bounds": bounds}
    memory = SearchMemory(lambda: facts, is_off=no_cache or strategy is not None)
    noise = noise_scale_on_data(source, options) if noise_scale else None
    rate = loader_rate(source) if throughput and source.loader and is_rank_0 else None

    def tell(_: Supervisor, result: BatchSizeResult) -> None:
        if not is_rank_0:
            return
        result = replace(result, mode=options.mode, eval_batch_size=options.eval_batch_size)
        result = memory.keep(result)
        result, plan = _planned(result, global_batch_size, options.accumulate, bounds)
        if rate is not None and result.throughput is not None:
            result = replace(
                result, warnings=(*result.warnings, *loader_remarks(rate, result.throughput))
            )
        reporter.finish()
        if not as_json and (result.status is not Status.FAILED or result.batch_size):
            reporter.answer(result, plan, chart=chart)
            if noise is not None:
                click.echo(noise_line(noise))
        more: dict[str, Any] = {"accumulation_plan": asdict(plan)} if plan else {}
        more |= {"noise_scale": noise.to_dict()} if noise else {}
        more |= {"loader_samples_per_second": rate} if rate else {}
        deliver({**result.to_dict(), **more}, as_json=as_json, report=report)

    estimate = EstimateOrder(ESTIMATE, bounds)
    make_prober = make_prober or partial(
        worker_prober,
        probe_timeout_seconds=probe_timeout,
        show_output=verbose,
        estimate=estimate if start_from_estimate else None,
    )
    with TerminalReporter(quiet=quiet or not is_rank_0, verbose=verbose) as reporter:
        return search_in_terminal(
            partial(make_prober, source, options),
            reporter,
            tell,
            headroom=options.headroom,
            bounds=bounds,
            show_probe=lambda _, probe: reporter.probe(probe),
            deadline=deadline,
            measures_throughput=throughput,
            is_limited=options.memory_limit is not None,
            recall=lambda prober: memory.recall(
                prober,
                lambda: {"setup": prober.fingerprint(), "capacity_bytes": prober.capacity_bytes},
            ),
            make_head_start=lambda prober: head_start_of(
                prober,
                options.confirm_steps,
                (lambda *_: prober.estimate()) if start_from_estimate else None,
            ),
        )


def _check_plan(global_batch_size: int | None, mode: str, is_noise_unknown: bool) -> None:
    if global_batch_size is not None:
        positive("--global-batch-size", global_batch_size)
        if mode != "train":
            raise UsageError(
                f"--global-batch-size belongs to training, and --mode is {mode}. Try without it."
            )
    if is_noise_unknown:
        raise UsageError(NOISE_NEEDS_DATA)


def _planned(
    result: BatchSizeResult, global_batch_size: int | None, accumulate: bool, bounds: Bounds
) -> tuple[BatchSizeResult, AccumulationPlan | None]:
    """Plan how to reach the global batch size; warn if accumulation was not measured."""
    if global_batch_size is None or not result.batch_size:
        return result, None
    plan = result.accumulation_plan(
        global_batch_size, min_batch_size=bounds.first, multiple_of=bounds.multiple_of
    )
    if plan.accumulates and not accumulate:
        result = replace(result, warnings=(*result.warnings, NOT_ACCUMULATED_WARNING))
    return result, plan


def worker_prober(
    source: SetupSource,
    options: ProbeOptions,
    *,
    probe_timeout_seconds: float | None = None,
    show_output: bool = False,
    estimate: EstimateOrder | None = None,
) -> Supervisor:
    """Make the prober of a target: one with a worker process, or one for all ranks.

    Raises:
        BatchFinderError: the target cannot be loaded, or the device is unavailable.
    """
    launch = partial(WorkerProcess, show_output)
    worker = partial(ProcessWorker, launch, source, probe_timeout_seconds=probe_timeout_seconds)
    if options.strategy is None:
        check_target(source.target)
        return Supervisor(worker(), options, estimate)
    # Imported late: the parent of a single worker does not need torch.
    from batchfinder.probing.ranks.meeting import open_meeting
    from batchfinder.probing.ranks.prober import RankProber, times_of_ranks

    of_rank = worker(step_times=times_of_ranks())
    return RankProber(of_rank, source, options, open_meeting(), estimate)
