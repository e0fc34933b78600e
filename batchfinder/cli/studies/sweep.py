"""``batchfinder sweep``: the largest batch size for each value of an argument."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import click

from batchfinder.cli.estimating.estimate import end, for_estimates, gpus_of, load, user_code
from batchfinder.cli.exiting import terminated_as_ctrl_c
from batchfinder.cli.output import deliver, live_line, print_notes, width_of_table
from batchfinder.cli.request import Request, parse_arguments, refuse_real_steps, request_of
from batchfinder.errors import UsageError
from batchfinder.probing.devices.versions import versions
from batchfinder.reporting.page.page import check_report
from batchfinder.reporting.sweeps import paste_lines, sweep_table
from batchfinder.results.version import SCHEMA_VERSION
from batchfinder.studies.sweep import sweep_on_device, sweep_on_gpus
from batchfinder.studies.sweep_result import Sweep, SweepRow
from batchfinder.studies.sweep_values import bound, combinations
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.target import accepts, load_function
from batchfinder.training.user_module import is_language_model, load_module
from batchfinder.units import count


def sweep(
    target: str,
    *,
    swept: Sequence[str],
    gpu_names: Sequence[str],
    memory: str | None,
    as_json: bool,
    report: str | None,
    quiet: bool,
    **shared: Any,
) -> int:
    """Run ``batchfinder sweep`` and return the exit status."""
    request = request_of(target, shared, one_length=False)
    over = _swept(request, swept)
    check_report(report)
    gpus = gpus_of(gpu_names, memory, None) if gpu_names or memory else []
    if gpus:
        refuse_real_steps(shared)
    source = request.source
    warnings: list[str] = []
    with user_code(), live_line(quiet=quiet) as show:
        with for_estimates(target) if gpus else contextlib.nullcontext():
            batches_from = source.sample or source.loader
            of_batches = _names_for_batches(target, batches_from, over)
            warnings += _unreached(batches_from, {*over} - {*of_batches})

        def of_values(values: Mapping[str, Any]) -> TrainingSetup:
            of_batch = {name: values[name] for name in of_batches}
            to_target = {name: values[name] for name in values if name not in of_batch}
            setup = load(source.with_arguments(to_target), warnings, on_paper=bool(gpus))
            if of_batch and setup.make_batch is None:  # its error names the nearest argument
                return load(source.with_arguments(values), warnings, on_paper=bool(gpus))
            return bound(setup, of_batch)

        # Where a process of its own for each value is needed, it must load all by itself.
        base = None if of_batches else source
        options, bounds = request.options, request.bounds
        if gpus:
            progress = sweep_on_gpus(of_values, over, gpus, options, bounds, show)
        else:
            progress = sweep_on_device(of_values, over, options, bounds, base, show)
        sweeps: list[Sweep] = []
        status = 0
        with terminated_as_ctrl_c() as why:
            try:
                for row, so_far in progress:
                    sweeps = so_far
                    show("")
                    if row is not None and not quiet:
                        _show(row)
            except KeyboardInterrupt:  # the rows that have ended are worth their time
                status = why[-1]
    if status and not sweeps:
        return status
    if not as_json:
        width = width_of_table()
        texts = ("\n".join([*sweep_table(one, width), "", *paste_lines(one)]) for one in sweeps)
        click.echo("\n\n".join(text.rstrip() for text in texts))
    data = [one.to_dict() for one in sweeps]
    content = data[0] if len(data) == 1 else {"schema_version": SCHEMA_VERSION, "sweeps": data}
    deliver({**content, "versions": versions()}, as_json=as_json, report=report)
    print_notes([*warnings, *(text for one in sweeps for text in one.warnings)], quiet=quiet)
    fits = any(row.batch_size for one in sweeps for row in one.rows)
    return status or end(fits, request, gpus, quiet=quiet)


def _swept(request: Request, texts: Sequence[str]) -> dict[str, list[object]]:
    seq = [f"seq={','.join(map(str, request.lengths))}"] if request.lengths else []
    over = parse_swept([*texts, *seq])
    if not over:
        raise UsageError("nothing is swept. Try --over seq_len=512,1024,2048.")
    if both := over.keys() & request.source.arguments.keys():
        raise UsageError(f"{min(both)} is in --over and in --arg. Try one of the two.")
    combinations(over)
    return over


def parse_swept(texts: Sequence[str]) -> dict[str, list[object]]:
    """Read the values of ``--over``.

    Raises:
        UsageError: a text is not ``NAME=A,B,C``.

    Example:
        >>> parse_swept(["seq_len=512,1024", "image_size=224"])
        {'seq_len': [512, 1024], 'image_size': [224]}
    """
    over: dict[str, list[object]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name.isidentifier() or not values.strip():
            raise UsageError(f"--over {text!r} cannot be read. Try --over seq_len=512,1024,2048.")
        if name in over:
            raise UsageError(f"--over {name} is given twice. Try one list of all its values.")
        pairs = [f"{name}={value.strip()}" for value in values.split(",") if value.strip()]
        over[name] = [parse_arguments([pair])[name] for pair in pairs]
    return over


def _names_for_batches(
    target: str, sample: str | None, over: Mapping[str, Sequence[Any]]
) -> list[str]:
    """Return the swept arguments that neither the target nor its sample takes."""
    if is_language_model(target):
        return []
    functions = [load_function(target), load_function(sample) if sample else None]
    if sample is None:
        functions.append(getattr(load_module(target.rpartition(":")[0]), "build_sample", None))
    return [name for name in over if not any(f and accepts(f, name) for f in functions)]


def _unreached(batches_from: str | None, names: set[str]) -> list[str]:
    """Note the swept arguments that the function for the batches does not take."""
    return [
        f"{batches_from} takes no {name}, so the examples are the same at each value. If they "
        f"should differ, try a function that takes {name}"
        for name in sorted(names)
        if batches_from is not None and not accepts(load_function(batches_from), name)
    ]


def _show(row: SweepRow) -> None:
    """Print one line as a value ends."""
    probes = "" if row.note else f", {count(len(row.probes), 'probe')}"
    click.echo(f"  {row}{probes}", err=True)
