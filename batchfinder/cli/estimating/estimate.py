"""``batchfinder estimate``: from command-line options to a table and an exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from batchfinder.cli.estimating.levers import what_to_change
from batchfinder.cli.exiting import FOUND, NOTHING_FITS
from batchfinder.cli.output import deliver, live_line, print_notes, width_of_table
from batchfinder.cli.request import Request, request_of
from batchfinder.errors import BatchFinderError, UsageError, UserCodeError
from batchfinder.estimator import estimate_on_gpus
from batchfinder.probing.devices.allocator.caching import AllocatorSettings
from batchfinder.probing.devices.oom import classify
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.reporting.estimates import (
    cluster_table,
    estimate_table,
    explanation_lines,
    length_table,
    overhead_line,
)
from batchfinder.reporting.page.page import check_report
from batchfinder.results.version import SCHEMA_VERSION
from batchfinder.search.bounds import Bounds
from batchfinder.simulation.calibration import Calibration, read_measurement
from batchfinder.simulation.estimate import ClusterEstimate, Estimate
from batchfinder.simulation.gpus import GIVEN, Gpu, find_gpu, unnamed_gpu
from batchfinder.simulation.prober import SimulatedProber
from batchfinder.simulation.tracing.autocast import cuda_autocast_on_cpu
from batchfinder.simulation.tracing.data_parallel import Cluster
from batchfinder.simulation.tracing.refusal import without_cuda
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.training.loading import load_setup
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.user_module import is_language_model
from batchfinder.training.user_traceback import error_line, user_traceback
from batchfinder.units import format_bytes, parse_bytes

TOO_LITTLE = (
    "this machine has too little memory to run the target. Try to build the model with "
    "torch.device('meta'), which needs no memory, and a sample of fewer examples"
)


def estimate_batch_size(
    target: str,
    *,
    gpu_names: Sequence[str],
    memory: str | None,
    overhead: str | None,
    expandable_segments: bool,
    strategy: str | None,
    world_size: int | None,
    calibrate: str | None,
    forget_calibration: bool,
    explain: bool,
    as_json: bool,
    report: str | None,
    quiet: bool,
    **shared: Any,
) -> int:
    """Run ``batchfinder estimate`` and return the exit status."""
    request = request_of(target, shared, one_length=False)
    largest = _cluster(strategy, world_size)
    check_report(report)
    gpus = gpus_of(gpu_names, memory, overhead)
    options, lengths = request.options, request.lengths
    if largest is not None and len(lengths) > 1:
        raise UsageError("--world-size is for one length. Try a single --seq.")
    settings = AllocatorSettings(expandable_segments=expandable_segments)
    calibration = Calibration.load()
    if forget_calibration:
        calibration.forget()
    runs: dict[int | None, Sequence[Estimate]] = {}
    jobs: list[ClusterEstimate] = []
    warnings: list[str] = []
    with user_code(), live_line(quiet=quiet) as show:
        for length in (*lengths,) or (None,):
            of_length = {} if length is None else {"seq": length}
            source = request.source.with_arguments(of_length)
            at = "" if length is None else f" at {length} tokens"
            show(f"estimating {target}{at} ...")
            setup = load(source, warnings, on_paper=True)
            if calibrate is not None:
                _calibrate(calibration, Path(calibrate), setup, options, settings)
            known = [calibration.applied(gpu) for gpu in gpus] if overhead is None else gpus
            if largest is not None:
                jobs += _estimate_on_cluster(
                    setup, known, options, settings, request.bounds, largest
                )
                runs[length] = [job.estimate for job in jobs]
            else:
                runs[length] = estimate_on_gpus(setup, known, options, settings, request.bounds)
    estimates = [estimate for run in runs.values() for estimate in run]
    if not as_json:
        _print(runs, jobs, explain=explain)
    rows = [one.to_dict() for one in jobs] or [
        {**one.to_dict(), **({} if length is None else {"seq": length})}
        for length, run in runs.items()
        for one in run
    ]
    deliver({"schema_version": SCHEMA_VERSION, "estimates": rows}, as_json=as_json, report=report)
    warnings += [text for estimate in estimates for text in estimate.result.warnings]
    notes = [calibration.note(gpu) for gpu in gpus if overhead is None]
    print_notes([*warnings, *notes, _too_small(estimates)], quiet=quiet)
    return end(any(one.batch_size for one in estimates), request, gpus, quiet=quiet)


def _estimate_on_cluster(
    setup: TrainingSetup,
    gpus: Sequence[Gpu],
    options: ProbeOptions,
    settings: AllocatorSettings,
    bounds: Bounds,
    largest: Cluster,
) -> list[ClusterEstimate]:
    """Estimate jobs of 1, 2, 4, ... ranks, up to the largest; one rank of each is simulated.

    All ranks of a job use the same kind of GPU. Returns, for each GPU in the given order, the jobs
    from small to large.
    """
    by_gpu: list[list[ClusterEstimate]] = [[] for _ in gpus]
    for world_size in _doublings(largest.world_size):
        cluster = dataclasses.replace(largest, world_size=world_size)
        estimates = estimate_on_gpus(setup, gpus, options, settings, bounds, cluster=cluster)
        for row, estimate in zip(by_gpu, estimates, strict=True):
            row.append(ClusterEstimate(cluster, estimate))
    return [estimate for row in by_gpu for estimate in row]


def _doublings(largest: int) -> list[int]:
    """Return 1, 2, 4, ... and the largest itself."""
    powers = (2**exponent for exponent in range(largest.bit_length()))
    return [*(power for power in powers if power < largest), largest]


def end(is_any: bool, request: Request, gpus: Sequence[Gpu], *, quiet: bool) -> int:
    """Return the exit status of estimates. If nothing fits, say what to change."""
    if gpus and not is_any and not quiet:
        with user_code():
            advice = what_to_change(request, gpus, partial(load, warnings=[], on_paper=True))
        print_notes([advice])
    return FOUND if is_any else NOTHING_FITS


def _too_small(estimates: Sequence[Estimate]) -> str:
    """Return what to do about GPUs on which nothing fits, beside others on which something does."""
    fitting = {estimate.gpu.name for estimate in estimates if estimate.batch_size}
    rest = [name for name in dict.fromkeys(e.gpu.name for e in estimates) if name not in fitting]
    if not fitting or not rest:
        return ""
    alone = shlex.quote(rest[0])
    return (
        f"nothing fits on {', '.join(rest)}. Try --gpu {alone} alone, to see what would change that"
    )


@contextlib.contextmanager
def for_estimates(target: str) -> Iterator[None]:
    """Load a target for a GPU that is not there: a language model gets weights without data."""
    without_data = torch.device("meta") if is_language_model(target) else contextlib.nullcontext()
    with cuda_autocast_on_cpu(), without_data:
        yield


def load(source: SetupSource, warnings: list[str], *, on_paper: bool = False) -> TrainingSetup:
    """Load the setup of a command, on paper for a GPU that is not there; add to the warnings."""
    with for_estimates(source.target) if on_paper else contextlib.nullcontext():
        setup, remarks = load_setup(**vars(source))
    warnings += remarks
    return setup


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Run the user's code: its errors are raised as ``UserCodeError``, with their traceback."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # its output must not mix with the answer
            yield
    except BatchFinderError:
        raise
    except Exception as error:
        refusal = without_cuda(error)
        if refusal is not None:
            raise refusal from error
        message = error_line(error) if classify(error) is None else TOO_LITTLE
        raise UserCodeError(message, user_traceback(error)) from error


def gpus_of(names: Sequence[str], memory: str | None, overhead: str | None) -> list[Gpu]:
    """Return the GPUs that the options name, with the memory that they give them.

    Raises:
        UsageError: there is none, or one is unknown.
    """
    gpus = list(dict.fromkeys(map(find_gpu, names)))
    if memory is not None:
        total = parse_bytes(memory)
        if gpus:
            gpus = [dataclasses.replace(gpu, total_bytes=total) for gpu in gpus]
        else:
            gpus = [unnamed_gpu(total)]
    if not gpus:
        raise UsageError(
            "no GPU is given. Try --gpu rtx3090 --gpu h100, to see on which it fits, or "
            "--memory 24GiB."
        )
    if overhead is not None:
        size = parse_bytes(overhead, least=0)
        gpus = [
            dataclasses.replace(gpu, overhead_bytes=size, overhead_source=GIVEN) for gpu in gpus
        ]
    return gpus


def _calibrate(
    calibration: Calibration,
    path: Path,
    setup: TrainingSetup,
    options: ProbeOptions,
    settings: AllocatorSettings,
) -> None:
    """Learn the difference between measured and simulated memory from one measured size."""
    measured = read_measurement(path)
    gpu = find_gpu(measured.gpu_name)
    # Enough memory that the measured size fits whatever the correction is.
    roomy = dataclasses.replace(gpu, total_bytes=4 * gpu.total_bytes)
    traces = StepTraces(setup, options, gpu.compute_capability)
    run = SimulatedProber(traces, roomy, options, settings).replay(measured.batch_size)
    correction = measured.peak_reserved_bytes - run.peak_reserved_bytes
    outside = measured.outside_bytes or gpu.overhead_bytes
    calibration.learn(gpu.name, correction + outside - gpu.overhead_bytes)
    source = (
        "as measured"
        if measured.outside_bytes
        else f"still assumed, as {path} does not say it. Try one of batchfinder find today"
    )
    click.echo(
        f"Calibrated for {gpu.name}: {format_bytes(correction)} added to the simulated memory, "
        f"saved in {calibration.path}. Outside PyTorch's allocator: {format_bytes(outside)}, "
        f"{source}",
        err=True,
    )


def _cluster(strategy: str | None, world_size: int | None) -> Cluster | None:
    if strategy is None and world_size is None:
        return None
    if strategy is None or world_size is None:
        raise UsageError(
            "--strategy and --world-size need each other. Try --strategy fsdp --world-size 64."
        )
    return Cluster(strategy, world_size)


def _print(
    runs: Mapping[int | None, Sequence[Estimate]],
    jobs: Sequence[ClusterEstimate],
    *,
    explain: bool,
) -> None:
    estimates = [estimate for run in runs.values() for estimate in run]
    width = width_of_table()
    if jobs:
        lines = cluster_table(jobs, width)
    elif len(runs) > 1:
        lines = length_table(runs)
    else:
        lines = estimate_table(estimates, width)
    if explain:
        for estimate in estimates:
            lines += ["", estimate.gpu.name, *explanation_lines(estimate.explanation)]
            lines.append(overhead_line(estimate.gpu))
    click.echo("\n".join(lines))
