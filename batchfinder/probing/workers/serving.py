"""Carry out orders in this process, which is a worker: load, try sizes, estimate."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.here import Here
from batchfinder.probing.workers.setup_source import load_from, mark_as_worker
from batchfinder.probing.workers.worker import EstimateOrder, Order, Ranks
from batchfinder.search.bounds import Bounds
from batchfinder.training.parallel import has_compiled
from batchfinder.training.user_traceback import error_line

if TYPE_CHECKING:
    from batchfinder.probing.workers.child import Line
    from batchfinder.training.setup import TrainingSetup


def serve(
    line: Line,
    order: dict[str, Any],
    setup: TrainingSetup | None,
    warnings: list[str] | None = None,
) -> None:
    """Serve until the orders end.

    The first order is to start, or with a ``place``, to estimate the answer there. Without a setup,
    it names the source. ``warnings`` are those from loading the setup.
    """
    if "place" in order:
        line.pass_on(estimated(setup, order))
        return
    setup, worker = line.or_tell(partial(_start, line, order, setup, warnings or []))

    def carry_out(asked: Mapping[str, Any]) -> None:
        if "fingerprint" in asked:
            line.answer("fingerprint", facts=worker.fingerprint())
        elif "batch_size" in asked:
            attempt = worker.attempt(asked["batch_size"], asked["confirm"])
            line.answer("attempt", attempt=attempt.to_dict())
        else:
            line.pass_on(estimated(setup, {**order, "place": asdict(worker.place)}))

    while True:
        line.or_tell(partial(carry_out, line.next_order()))


def _start(
    line: Line, order: Mapping[str, Any], setup: TrainingSetup | None, warnings: list[str]
) -> tuple[TrainingSetup, Here]:
    """Load the setup, start a worker in this process, and answer that it is ready."""
    options = ProbeOptions(**order["options"])
    ranks = None
    if order["group"]:
        from batchfinder.probing.workers.group import GroupInvitation, all_agree, join

        # Join before the target is loaded, because it may shard the model itself.
        group = GroupInvitation.from_dict(order["group"])
        options = replace(options, device=join(group, options.device))
        ranks = Ranks(group.job.local_world_size, all_agree)
    if setup is None:
        setup, warnings = load_from(order["source"])
    mark_as_worker()
    on_step = lambda: line.answer("step", compiles=has_compiled())  # noqa: E731
    worker = Here(setup, on_step=on_step, is_replaceable=True, ranks=ranks)
    place = worker.start(Order(options))
    spare_what_is_loaded()
    line.answer("ready", place=asdict(place), warnings=warnings, restarts=False)
    return setup, worker


def spare_what_is_loaded() -> None:
    """Keep the garbage collector from looking at all loaded objects after each probe."""
    gc.collect()
    gc.freeze()


def estimated(setup: TrainingSetup | None, order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to an order to estimate: the size, or the reason why there is none."""
    estimate, place = EstimateOrder(**order["estimate"]), order["place"]
    try:
        if setup is None:
            setup, _ = load_from(order["source"])
        options = ProbeOptions(**order["options"])
        batch_size, notes = resolve_name(estimate.function)(
            setup, options, place["device"], place["budget_bytes"], Bounds(*estimate.bounds)
        )
    except Exception as error:  # noqa: BLE001 - the user's code runs here
        return no_estimate(error)
    return {"answer": "estimate", "batch_size": batch_size, "notes": notes}


def no_estimate(error: Exception) -> dict[str, Any]:
    """Return the answer for an estimate that failed."""
    reason = error_line(error)
    note = f"the search started without an estimate: {reason}"
    return {"answer": "estimate", "batch_size": None, "notes": [note]}
