"""``batchfinder run``: from a command with placeholders to a result and an exit status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchfinder.cli.exiting import ctrl_c_ends
from batchfinder.cli.output import deliver, leftovers_named
from batchfinder.cli.remembering import SearchMemory
from batchfinder.cli.searching import search_in_terminal
from batchfinder.errors import UsageError
from batchfinder.launching.conclusion import overruled
from batchfinder.launching.options import RunOptions, choose_kind
from batchfinder.launching.template import Template
from batchfinder.probing.code import digests, files_of_command
from batchfinder.reporting.page.page import check_report
from batchfinder.reporting.progress import TerminalReporter
from batchfinder.results.result import Status
from batchfinder.search.bounds import Bounds
from batchfinder.search.deadline import deadline_in
from batchfinder.search.plan import Prices
from batchfinder.units import bytes_if_given, parse_headroom

# The width of the final bracket, as a share of the size. A narrower one would need one to three
# more launches of 5 to 20 seconds each (scripts/results/scripts.json).
RESOLUTION = 0.03

# A step that fills all of a CPU's memory may take minutes, and every launch runs six or more. So a
# search without a limit on memory or time ends after this many seconds.
CPU_SECONDS = 600
TOO_SLOW = (
    f"without --memory-limit, a search on the CPU ends after {CPU_SECONDS // 60} min. Try "
    f"--memory-limit 4GiB for what fits there, or --time-limit {12 * CPU_SECONDS} for more memory"
)

if TYPE_CHECKING:
    from batchfinder.launching.prober import LaunchProber
    from batchfinder.results.probe import Probe
    from batchfinder.results.result import BatchSizeResult


def run_command(
    command_line: Sequence[str],
    *,
    device: str | None,
    memory_limit: str | None,
    headroom: str,
    min_batch_size: int,
    max_batch_size: int | None,
    multiple_of: int,
    steps: int,
    mode: str,
    timeout: float | None,
    time_limit: float | None,
    no_cache: bool,
    global_batch_size: int | None,
    settings: Sequence[str],
    files: Sequence[str],
    as_json: bool,
    report: str | None,
    chart: bool,
    quiet: bool,
    verbose: bool,
) -> int:
    """Run ``batchfinder run`` and return the exit status."""
    check_report(report)
    bounds = Bounds.of(min_batch_size, max_batch_size, multiple_of, global_batch_size)
    template = Template([*command_line], parse_settings(settings), tuple(files), global_batch_size)
    options = RunOptions(
        device=device,
        memory_limit=bytes_if_given(memory_limit),
        headroom=parse_headroom(headroom),
        steps=steps,
        mode=mode,
        timeout_seconds=timeout,
        show_output=verbose,
    )
    deadline = deadline_in(time_limit)
    memory = SearchMemory(partial(_facts_of, template, options, bounds), is_off=no_cache)
    prices = Prices(confirm=1, resolution=RESOLUTION)  # each launch confirms
    shown = 0

    # Late, because PyTorch is slow to import: mistakes in the options are reported before.
    with ctrl_c_ends():
        from batchfinder.launching.prober import LaunchProber

    has_limit = time_limit is not None or memory_limit is not None
    is_hurried = not has_limit and choose_kind(device)[0] == "cpu"
    if is_hurried:
        deadline = deadline_in(CPU_SECONDS)

    def launch() -> LaunchProber:
        first = memory.newest_size() or bounds.first
        reporter.probing(first)
        return LaunchProber(template, options, bounds, prices, first=first)

    def show_launches(prober: LaunchProber, probe: Probe) -> None:
        nonlocal shown
        rows = overruled(prober.launched, [probe])
        before = zip(rows[:shown], prober.launched, strict=False)
        refuted = [row for row, launched in before if row.fits != launched.fits]
        for row in rows[shown:] + refuted:
            reporter.probe(row)
        shown = len(prober.launched)

    def tell(prober: LaunchProber, result: BatchSizeResult) -> None:
        leftovers.saved += prober.saved
        is_late = is_hurried and result.status is Status.TIME_LIMIT
        remarks = [TOO_SLOW if is_late else "", leftovers.warning()]
        warnings = filter(None, remarks)
        result = memory.keep(prober.conclude(result))
        result = replace(result, warnings=(*result.warnings, *warnings))
        has_answer = result.batch_size and result.status is not Status.FAILED
        command = prober.template.command(result.batch_size) if has_answer else None
        reporter.finish()
        if not as_json and (command or not result.batch_size):
            reporter.answer(result, chart=chart)
            if command and not quiet:
                click.echo(f"Run: {command}")
        more = {"launches": len(prober.launched), "command": command}
        deliver({**result.to_dict(), **more}, as_json=as_json, report=report)

    with (
        leftovers_named() as leftovers,
        TerminalReporter(quiet=quiet, verbose=verbose) as reporter,
    ):
        return search_in_terminal(
            launch,
            reporter,
            tell,
            headroom=options.headroom,
            bounds=bounds,
            show_probe=show_launches,
            make_head_start=LaunchProber.head_start,
            prices=prices,
            deadline=deadline,
            is_limited=has_limit,
            room=lambda prober: prober.room,
            recall=lambda prober: memory.recall(prober, lambda: {"processes": prober.processes}),
        )


def _facts_of(template: Template, options: RunOptions, bounds: Bounds) -> dict[str, Any]:
    """Return what the answer of this command depends on, such as its current code."""
    return {
        "template": asdict(template),
        "options": asdict(options),
        "bounds": bounds,
        "folder": str(Path.cwd()),
        "code": digests([*template.files, *files_of_command(template.arguments)]),
    }


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """Read the texts ``NAME=VALUE`` of ``--env``.

    Raises:
        UsageError: a text is not ``NAME=VALUE``.
    """
    pairs = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(
                f"--env takes NAME=VALUE, not {setting!r}. Try --env BS={{batch_size}}"
            )
        pairs[name] = value
    return pairs
