"""What a worker process does with its orders: it loads the setup, then runs probe after probe."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from batchfinder.errors import DeviceError
from batchfinder.probing.attempt import Attempt
from batchfinder.probing.devices.choose import choose_device
from batchfinder.probing.devices.device import budget
from batchfinder.probing.devices.versions import versions
from batchfinder.probing.in_process import InProcessProber
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.session import ProbeSession
from batchfinder.probing.workers.group import (
    GroupInvitation,
    all_agree,
    device_of_rank,
    facts_of,
    join,
    shared,
)
from batchfinder.probing.workers.source import load_ordered
from batchfinder.results.result import Outcome, Probe
from batchfinder.training.optimizer import find_optimizer
from batchfinder.training.sample import BatchMaker


class WorkerDuty:
    """The probes of one setup, in the process that this is.

    Args:
        order: the first one: what to load, and the options.
        opened: where the limit on the memory is entered.
        answer: sends an answer.
    """

    def __init__(
        self,
        order: Mapping[str, Any],
        opened: contextlib.ExitStack,
        answer: Callable[..., None],
    ) -> None:
        options = ProbeOptions.from_dict(order["options"])
        group = GroupInvitation.from_dict(order["group"]) if order["group"] else None
        if group is not None:
            options = replace(options, device=device_of_rank(options.device, group.accelerator))
            # Before the target is loaded: it may want to shard the model itself.
            join(group, str(options.device))
        setup, self.warnings = load_ordered(order)
        device = choose_device(options.device, setup.model)
        memory = device.memory()
        if group is not None and device.torch_device.type == "cpu":
            memory, options = shared(memory, options, group.local_world_size)
        budget_bytes = options.budget_bytes or budget(
            memory, options.memory_limit, options.headroom
        )
        if isinstance(setup.optimizer, str):
            find_optimizer(setup.optimizer)  # a wrong name is told before anything is shown
        batches = BatchMaker(setup.sample, make_batch=setup.make_batch, batch_dim=options.batch_dim)
        answer(
            "ready",
            device=device.name,
            budget_bytes=budget_bytes,
            capacity_bytes=memory.capacity_bytes,
            used_by_others_bytes=memory.used_by_others_bytes,
            is_repeatable=device.leaves_no_trace,
            limit_warning=device.limit_warning,
            versions=versions(),
            facts={} if group is None else facts_of(setup, batches, device),
        )
        # What loading has left is not to be looked at again after each probe.
        gc.collect()
        gc.freeze()
        self._prober: InProcessProber | None = None

        def on_step() -> None:
            answer("step", compiles=has_compiled())

        if device.leaves_no_trace and group is None:
            options = replace(options, budget_bytes=budget_bytes)
            self._prober = InProcessProber(setup, options, on_step)
            return
        opened.enter_context(device.limited_to(budget_bytes))
        self._session = ProbeSession(
            setup,
            batches,
            device,
            budget_bytes,
            options,
            on_step,
            all_agree if group is not None else bool,
        )

    def run(self, order: Mapping[str, Any]) -> Attempt:
        """Run the probe that an order asks for."""
        if self._prober is not None:
            return self._run_and_renew(self._prober, order["batch_size"], order["confirm"])
        run = self._session.confirm if order["confirm"] else self._session.probe
        try:
            attempt = run(order["batch_size"])
        finally:
            self._warn(self._session.warnings)
        return replace(attempt, is_reusable=attempt.is_reusable and not order["confirm"])

    def _run_and_renew(self, prober: InProcessProber, batch_size: int, confirm: bool) -> Attempt:
        """Where this process can be made as good as new, that takes less than starting another."""
        if confirm and not _is_renewed(prober):
            unfit = Probe(batch_size, Outcome.OOM, steps=0, seconds=0.0, confirmed=confirm)
            return Attempt(unfit, was_clean=False, is_reusable=False)
        try:
            attempt = prober.attempt(batch_size, confirm)
        finally:
            self._warn(prober.warnings)
        if confirm and attempt.is_reusable:
            return replace(attempt, is_reusable=_is_renewed(prober))
        return attempt

    def _warn(self, warnings: Iterable[str]) -> None:
        self.warnings = list(dict.fromkeys((*self.warnings, *warnings)))


def _is_renewed(prober: InProcessProber) -> bool:
    """Whether the process has been made as good as new."""
    try:
        return prober.start_over()
    except DeviceError:
        return False


def has_compiled() -> bool:
    """Whether this process has compiled anything: the user's code may, and tells nobody."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"]["total"])
