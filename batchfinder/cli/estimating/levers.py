"""What to change if not even the smallest batch size fits."""

from __future__ import annotations

import importlib.util
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import click

from batchfinder.cli.request import Request
from batchfinder.errors import BatchFinderError, UsageError
from batchfinder.estimator import estimate_on_gpus
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.search.bounds import Bounds
from batchfinder.simulation.gpus import Gpu
from batchfinder.simulation.kernels.attention import ComputeCapability
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.training.frameworks.language_model import DEFAULT_RANK
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.user_module import is_language_model
from batchfinder.units import format_bytes

_AS_OPTION = {"checkpointing": "--checkpointing", "quantize": "--4bit"}
_NEEDS = {"lora": ("peft",), "quantize": ("peft", "bitsandbytes")}
_SHORTEST = 128  # tokens: with fewer, hardly anybody trains


def what_to_change(
    request: Request, gpus: Sequence[Gpu], load: Callable[[SetupSource], TrainingSetup]
) -> str:
    """Return what to try, for a target of which nothing fits on any of the GPUs.

    The options of a language model are added one after the other. Each one saves memory, so the
    first with which the smallest size fits is found by bisection. Each try is shown as it ends.
    """
    if not is_language_model(request.source.target):
        return "Try compare in place of estimate: it shows what each lever saves."
    gpu = max(gpus, key=lambda each: each.total_bytes)
    smallest = request.bounds.first
    given = {**request.source.arguments}
    if request.lengths:
        given["seq"] = min(request.lengths)
    if not given.get("seq"):
        setup = load(request.source)
        batch = setup.make_batch(1) if setup.make_batch else setup.sample
        given["seq"] = int(next(iter(batch.values())).shape[1])
    ladder = [*_ladder(given)]
    fitting: dict[str, bool] = {}

    def ends(levers: dict[str, Any]) -> bool:
        options = _as_options(levers)
        try:
            setup = load(request.source.with_arguments({**given, **levers}))
            (estimate,) = estimate_on_gpus(
                setup, [gpu], request.options, bounds=Bounds.of(smallest, smallest),
                make_traces=partial(_traces_of_one_size, setup, request.options),
            )  # fmt: skip
        except BatchFinderError as error:
            click.echo(f"  with {options}: {error}", err=True)
            return isinstance(error, UsageError)  # too short for an image: bisect longer ones
        fitting[options] = estimate.batch_size > 0
        needs = f"needs more than {format_bytes(estimate.peak_bytes)}"
        click.echo(f"  with {options}: {'fits' if fitting[options] else needs}", err=True)
        return fitting[options]

    click.echo("Nothing fits. Trying what would help:", err=True)
    first = bisect_left(ladder, True, key=ends)
    options = _as_options(ladder[first]) if first < len(ladder) else ""
    missing = "" if given.get("method") == "full" else " ".join(_missing("quantize"))
    more = f" For --4bit, which saves more, try pip install {missing}." if missing else ""
    if fitting.get(options):
        fits = f"fits the {gpu.name}" if len(gpus) > 1 else "fits"
        if len(request.lengths) > 1 and "--seq" not in options:
            fits += f" at {given['seq']} tokens"
        return f"Try {options}: batch size {smallest} {fits} with that, by the estimate.{more}"
    other = "Try a larger GPU, or --strategy fsdp --world-size 8: no lever above is enough."
    return f"{other}{more}"


def _missing(lever: str) -> list[str]:
    """Return the packages that a lever needs, and that are not installed."""
    return [name for name in _NEEDS.get(lever, ()) if importlib.util.find_spec(name) is None]


def _as_options(levers: Mapping[str, Any]) -> str:
    return " ".join(_AS_OPTION.get(key, f"--{key} {value}") for key, value in levers.items())


def _traces_of_one_size(
    setup: TrainingSetup, options: ProbeOptions, capability: ComputeCapability
) -> StepTraces:
    traces = StepTraces(setup, options, capability)
    traces.are_general = False  # no other size is asked for
    return traces


def _ladder(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield more and more arguments that need less memory, those that change least first."""
    levers: dict[str, Any] = {}
    steps = {"checkpointing": True, "lora": DEFAULT_RANK, "quantize": "4bit"}
    if given.get("method") == "qlora":
        steps.pop("quantize")
    if given.get("method") in ("full", "lora", "qlora"):
        steps.pop("lora")  # either it has adapters, or all weights are to be trained
    for name, value in steps.items():
        is_refused = name == "quantize" and given.get("method") == "full"
        if not given.get(name) and not is_refused and not _missing(name):
            levers[name] = value
            yield {**levers}
    seq = given["seq"] // 2
    while seq >= _SHORTEST:
        levers["seq"] = seq
        yield {**levers}
        seq //= 2
