"""``batchfinder compare``: from command-line options to a table and an exit status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from batchfinder.cli.estimating.estimate import end, gpus_of, load, user_code
from batchfinder.cli.exiting import terminated_as_ctrl_c
from batchfinder.cli.output import deliver, live_line, print_notes, width_of_table
from batchfinder.cli.request import refuse_real_steps, request_of
from batchfinder.errors import UsageError
from batchfinder.probing.devices.versions import versions
from batchfinder.reporting.comparison import comparison_table, equation_lines, marked_rows
from batchfinder.reporting.page.page import check_report
from batchfinder.results.version import SCHEMA_VERSION
from batchfinder.studies.comparison import Comparison, StrategyRow
from batchfinder.studies.comparison_request import ComparisonRequest, comparisons_of
from batchfinder.studies.estimate_strategies import estimate_strategies
from batchfinder.studies.measure_strategies import measure_strategies
from batchfinder.training.user_module import is_language_model
from batchfinder.units import format_seconds


def compare(
    target: str,
    *,
    gpu_names: Sequence[str],
    memory: str | None,
    measure: bool,
    strategies: Sequence[str],
    world_size: int,
    global_batch_size: int | None,
    explain: bool,
    as_json: bool,
    report: str | None,
    quiet: bool,
    **shared: Any,
) -> int:
    """Run ``batchfinder compare`` and return the exit status."""
    if not (gpu_names or memory or measure):
        raise UsageError("no device is given. Try --gpu rtx3090, --memory 24GiB, or --measure.")
    if explain and not (gpu_names or memory):
        raise UsageError("--explain needs an estimate. Try it with --gpu rtx3090.")
    check_report(report)
    request = request_of(target, shared)
    gpus = gpus_of(gpu_names, memory, None) if gpu_names or memory else []
    if not measure:
        refuse_real_steps(shared)
    comparisons: list[Comparison] = []
    warnings: list[str] = []
    status = 0
    with user_code(), live_line(quiet=quiet) as show:
        show(f"loading {target} ...")
        setup = load(request.source, warnings, on_paper=bool(gpus))
        for is_measured in [False] * bool(gpus) + [True] * measure:
            if is_measured and gpus and is_language_model(target):
                setup = load(request.source, warnings)  # the estimate's weights have no data
            wanted = ComparisonRequest.of(
                setup,
                request.options,
                request.bounds,
                strategies=strategies,
                world_size=world_size,
                global_batch_size=global_batch_size,
                is_measured=is_measured,
            )
            on = [] if is_measured else gpus
            rows = estimate_strategies(wanted, on, show) if on else measure_strategies(wanted, show)
            done: list[Sequence[StrategyRow]] = []
            status = _collect(rows, done, show if is_measured and not quiet else None)
            comparisons += comparisons_of(wanted, done, on)
            if status:
                break
    if status and not comparisons:
        return status
    if not as_json:
        _print(comparisons, explain=explain)
    tables = [comparison.to_dict() for comparison in comparisons]
    content = {"schema_version": SCHEMA_VERSION, "comparisons": tables, "versions": versions()}
    deliver(content, as_json=as_json, report=report)
    print_notes([*warnings, *(text for one in comparisons for text in one.warnings)], quiet=quiet)
    fits = any(row.batch_size for comparison in comparisons for row in comparison.rows)
    is_advised = bool(gpus) and is_language_model(target)
    return status or end(fits, request, gpus if is_advised else [], quiet=quiet)


def _collect(
    rows: Iterable[Sequence[StrategyRow]],
    done: list[Sequence[StrategyRow]],
    show: Callable[[str], None] | None,
) -> int:
    """Collect the rows that end before a signal; return the exit status.

    With ``show``, print one line as a strategy ends: a measured comparison takes minutes.
    """
    with terminated_as_ctrl_c() as why:
        try:
            for each in rows:
                done.append(each)
                if show:
                    show("")
                    _show_progress(*each)
        except KeyboardInterrupt:
            return why[-1]
    return 0


def _print(comparisons: Sequence[Comparison], *, explain: bool) -> None:
    width = width_of_table()
    paragraphs = []
    for comparison in comparisons:
        paragraphs.append(comparison_table(comparison, width))
        if explain and (rows := marked_rows(comparison)):
            paragraphs.append(equation_lines(*rows))
    click.echo("\n\n".join("\n".join(lines) for lines in paragraphs))


def _show_progress(row: StrategyRow) -> None:
    if row.result is None:
        text = row.note
    else:
        text = f"batch size {row.batch_size}, {format_seconds(row.result.seconds)}"
    click.echo(f"  {row.strategy.name}: {text}", err=True)
