"""``batchfinder check``: does one batch size train?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

import click
from click.core import ParameterSource

from batchfinder.cli.app import find, run_script
from batchfinder.cli.exiting import FOUND, NOTHING_FITS, ctrl_c_ends, terminated_as_ctrl_c
from batchfinder.cli.find import worker_prober
from batchfinder.cli.output import deliver, leftovers_named, live_line, print_notes
from batchfinder.cli.request import Request, refuse_real_steps, request_of
from batchfinder.cli.run import parse_settings
from batchfinder.errors import BatchFinderWarning, UsageError
from batchfinder.launching.options import RunOptions
from batchfinder.launching.template import Template
from batchfinder.reporting.advice import what_ran_out
from batchfinder.reporting.wording import one_line
from batchfinder.results.check import Check
from batchfinder.results.probe import Probe, without_place
from batchfinder.search.bounds import Bounds
from batchfinder.search.plan import Prices
from batchfinder.search.prober import Prober
from batchfinder.units import bytes_if_given, format_bytes, positive

if TYPE_CHECKING:
    from batchfinder.launching.prober import LaunchProber


def check_batch_size(
    words: Sequence[str],
    *,
    batch_size: int,
    gpu: str | None,
    memory: str | None,
    max_memory: str | None,
    settings: Sequence[str],
    files: Sequence[str],
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **shared: Any,
) -> int:
    """Run ``batchfinder check`` and return the exit status."""
    positive("--batch-size", batch_size)
    is_target = len(words) == 1 and "{" not in words[0] and not (settings or files)
    is_simulated = gpu is not None or memory is not None
    if is_simulated and not is_target:
        raise UsageError(
            "a simulated GPU needs a target. Try batchfinder check train.py:build_model"
        )
    only = {"min_batch_size": batch_size, "max_batch_size": batch_size, "multiple_of": 1}
    request = request_of(words[0] if is_target else "", {**shared, **only})
    most = bytes_if_given(max_memory)
    if is_simulated:
        refuse_real_steps(shared)
        names = [] if gpu is None else [gpu]
        found = _estimated(request, batch_size, names, memory, most, quiet=quiet)
    else:
        named = nullcontext() if is_target else leftovers_named()
        with (
            named as leftovers,
            terminated_as_ctrl_c() as why,
            live_line(quiet=quiet) as show,
        ):
            try:
                prober: Prober
                if leftovers is None:
                    prober = worker_prober(request.source, request.options, show_output=verbose)
                else:
                    template = Template([*words], parse_settings(settings), tuple(files))
                    prober = launcher = _launcher(template, batch_size, request, verbose)
                    leftovers.saved += launcher.saved
                with closing(prober):
                    show(_doing(batch_size))
                    probe = prober.probe(batch_size, confirm=True)
                    found = _judged(probe, prober, most)
                    show("")
                    for warning in () if quiet else prober.warnings:
                        click.echo(f"Warning: {warning}", err=True)
            except KeyboardInterrupt:
                return why[-1]
    deliver(found.to_dict(), as_json=as_json, report=None)
    if not as_json:
        click.echo(str(found))
    return FOUND if found.trains else NOTHING_FITS


def _judged(probe: Probe, prober: Prober, most: int | None) -> Check:
    peak = probe.peak_reserved_bytes or max(probe.phase_peak_bytes.values(), default=0)
    reason = "" if probe.fits else one_line(probe.note) or "out of memory"
    if story := what_ran_out(probe, reason, prober.budget_bytes):
        in_validation = "in its validation, " if without_place(reason)[1] else ""
        reason = f"{in_validation}it {story}"
    if probe.most_examples is not None:
        reason += f". Try --batch-size {probe.most_examples}, or a larger data set"
    trains, limit = probe.fits, min(prober.budget_bytes, most or prober.budget_bytes)
    if trains and most is not None and peak > most:
        trains, reason = False, f"its peak of {format_bytes(peak)} is above --max-memory"
    return Check(probe.batch_size, trains, prober.device, limit, peak or None, probe.steps, reason)


def _refuse_options_of_targets() -> None:
    """Raise a UsageError for the first option that `find` has, and `run` does not."""
    context = click.get_current_context()
    of_find, of_run = ({option.name for option in each.params} for each in (find, run_script))
    for option in context.command.params:
        is_given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if is_given and option.name in of_find - of_run:
            raise UsageError(f"{option.opts[0]} is for a target, not a command. Try without it.")


def _launcher(template: Template, batch_size: int, request: Request, verbose: bool) -> LaunchProber:
    # Late, because it is slow to import PyTorch: mistakes in the options are reported before.
    with ctrl_c_ends():
        from batchfinder.launching.prober import LaunchProber

    _refuse_options_of_targets()
    given = request.options
    options = RunOptions(
        device=given.device,
        memory_limit=given.memory_limit,
        headroom=given.headroom,
        mode=given.mode,
        show_output=verbose,
    )
    bounds = Bounds.of(batch_size, batch_size, multiple_of=batch_size)  # no other is asked for
    launcher = LaunchProber(template, options, bounds, Prices(confirm=1))
    launcher.settle(batch_size)
    return launcher


def _doing(batch_size: int) -> str:
    return f"checking batch size {batch_size} ..."


def _estimated(
    request: Request,
    batch_size: int,
    gpu_names: Sequence[str],
    memory: str | None,
    most: int | None,
    *,
    quiet: bool,
) -> Check:
    with ctrl_c_ends():
        from batchfinder.cli.estimating.estimate import gpus_of, load, user_code
        from batchfinder.estimator import estimate_peak_memory

    options, (device,) = request.options, gpus_of(gpu_names, memory, None)
    if options.memory_limit is not None:
        device = replace(device, total_bytes=min(device.total_bytes, options.memory_limit))
    notes: list[str] = []
    with user_code(), live_line(quiet=quiet) as show, catch_warnings():
        show(_doing(batch_size))
        simplefilter("ignore", BatchFinderWarning)  # the estimate has them
        estimate = estimate_peak_memory(
            load(request.source, notes, on_paper=True),
            batch_size=batch_size,
            gpu=device,
            headroom=options.headroom,
            precision=options.precision,
            accumulate=options.accumulate,
            mode=options.mode,
            eval_batch_size=options.eval_batch_size,
        )
    print_notes([*notes, *estimate.warnings], quiet=quiet)
    # The peak includes the memory outside the allocator, so the limit must too.
    limit = estimate.budget_bytes + estimate.gpu.overhead_bytes
    limit = min(limit, most or limit)
    trains = estimate.fits and estimate.peak_bytes <= limit
    peak, above = format_bytes(estimate.peak_bytes), estimate.peak_bytes - limit
    why = f"{format_bytes(above)} too much" if above > 0 else "reached by flushing the cache"
    reason = "" if trains else f"its estimated peak of {peak} is {why}"
    name = f"{estimate.gpu.name} (simulated)"
    return Check(batch_size, trains, name, limit, estimate.peak_bytes, 0, reason)
