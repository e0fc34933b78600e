"""What to change if not even the smallest batch size fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from batchfinder.cli.request import Request
from batchfinder.errors import BatchFinderError
from batchfinder.estimator import estimate_on_gpus
from batchfinder.probing.workers.source import SetupSource
from batchfinder.search.bounds import check_bounds
from batchfinder.simulation.gpus import Gpu
from batchfinder.training.frameworks.architecture import DEFAULT_SEQ
from batchfinder.training.frameworks.language_model import DEFAULT_RANK
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.user_module import is_language_model

_AS_OPTION = {"checkpointing": "--checkpointing", "quantize": "--4bit"}
_SHORTEST = 128  # tokens: with fewer, hardly anybody trains


def what_to_change(
    request: Request, gpus: Sequence[Gpu], load: Callable[[SetupSource], TrainingSetup]
) -> str:
    """Return what to try, for a target of which nothing fits on any of the GPUs.

    The options of a language model are tried one after the other, each beside those before it,
    until the smallest size fits by the estimate. Each one is shown as it ends.

    Args:
        request: the request of the command.
        gpus: its GPUs. The largest one is tried.
        load: loads the setup for an estimate.
    """
    if not is_language_model(request.source.target):
        return f"Try batchfinder compare {request.source.target}, for what each lever saves."
    gpu = max(gpus, key=lambda each: each.total_bytes)
    smallest, _ = check_bounds(*request.bounds)
    given = {**request.source.arguments}
    if request.lengths:
        given["seq"] = min(request.lengths)
    for levers in _ladder(given):
        options = " ".join(_AS_OPTION.get(key, f"--{key} {value}") for key, value in levers.items())
        source = request.source.with_arguments({**given, **levers})
        try:
            (estimate,) = estimate_on_gpus(
                load(source), [gpu], request.options,
                min_batch_size=smallest, max_batch_size=smallest,
            )  # fmt: skip
        except BatchFinderError as error:
            click.echo(f"  with {options}: {error}", err=True)
            continue
        click.echo(f"  with {options}: {'fits' if estimate.batch_size else 'none fits'}", err=True)
        if estimate.batch_size:
            return f"Try {options}: batch size {smallest} fits with that, by the estimate."
    return "Try a larger GPU, or --strategy fsdp --world-size 8: no lever above is enough."


def _ladder(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield more and more arguments that need less memory, those that change least first."""
    levers: dict[str, Any] = {}
    steps = {"checkpointing": True, "lora": DEFAULT_RANK, "quantize": "4bit"}
    if given.get("method") == "qlora":
        steps.pop("quantize")
    if given.get("method") in ("full", "lora", "qlora"):
        steps.pop("lora")  # either it has adapters, or all weights are to be trained
    for name, value in steps.items():
        if not given.get(name) and not (name == "quantize" and given.get("method") == "full"):
            levers[name] = value
            yield {**levers}
    seq = given.get("seq", DEFAULT_SEQ) // 2
    while seq >= _SHORTEST:
        levers["seq"] = seq
        yield {**levers}
        seq //= 2
