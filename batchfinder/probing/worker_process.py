"""The worker process: loads the setup, runs the probes it is asked for, says how they ended.

Started by :class:`~batchfinder.probing.worker.WorkerProber` as ``python -m
batchfinder.probing.worker_process``. Orders come as JSON lines on the standard input it was
started with, answers go as JSON lines to the standard output it was started with; what the user's
code prints goes to standard error, and what it reads is empty.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import IO, Any

from batchfinder.errors import BatchFinderError, UsageError
from batchfinder.probing.attempt import Attempt
from batchfinder.probing.device import budget
from batchfinder.probing.devices import choose_device
from batchfinder.probing.group import (
    GroupInvitation,
    all_agree,
    device_of_rank,
    facts_of,
    join,
    shared,
)
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.session import ProbeSession
from batchfinder.probing.versions import versions
from batchfinder.training.loading import load_setup
from batchfinder.training.optimizers import find_optimizer
from batchfinder.training.sample import BatchMaker, find_sample
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.user_traceback import user_traceback


def main() -> None:
    """Serve until the standard input closes."""
    orders, answers = _take_standard_streams()
    # Ctrl-C reaches the whole terminal; what then happens is for the parent to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(sys.stderr)

    def answer(what: str, **content: Any) -> None:
        answers.write(json.dumps({"answer": what, **content}) + "\n")
        answers.flush()

    queue: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_receive, args=(orders, queue), daemon=True).start()
    with contextlib.ExitStack() as opened:
        order = queue.get()
        worker = _or_tell(answer, lambda: Worker(order, opened, answer))
        while True:
            order = queue.get()
            attempt = _or_tell(answer, lambda: worker.run(order))  # noqa: B023 - called at once
            answer(
                "probe",
                probe=attempt.probe.to_dict(),
                was_clean=attempt.was_clean,
                is_clean=attempt.is_clean,
                warnings=worker.warnings,
            )


class Worker:
    """What one worker process does.

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
            options = replace(options, device=device_of_rank(options.device, group.local_rank))
            # Before the target is loaded: it may want to shard the model itself.
            join(group, str(options.device))
        setup, self.warnings = _load(order)
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
        opened.enter_context(device.limited_to(budget_bytes))
        self._session = ProbeSession(
            setup,
            batches,
            device,
            budget_bytes,
            options,
            lambda: answer("step"),
            all_agree if group is not None else bool,
        )

    def run(self, order: Mapping[str, Any]) -> Attempt:
        """Run the probe that an order asks for."""
        run = self._session.confirm if order["confirm"] else self._session.probe
        try:
            return run(order["batch_size"])
        finally:
            self.warnings = list(dict.fromkeys(self.warnings + self._session.warnings))


def _load(order: Mapping[str, Any]) -> tuple[TrainingSetup, list[str]]:
    if "pickled_setup" not in order:
        return load_setup(
            order["target"],
            order["arguments"],
            sample=order["sample"],
            input_spec=order["input_spec"],
            optimizer=order["optimizer"],
        )
    setup = _unpickled(order)
    found = find_sample(setup)
    warnings = [found.warning] if found.warning else []
    return replace(setup, sample=found.sample), warnings


def _unpickled(order: Mapping[str, Any]) -> TrainingSetup:
    sys.path[:] = order["module_path"]
    try:
        setup: TrainingSetup = pickle.loads(order["pickled_setup"])
    except Exception as error:  # noqa: BLE001 - classes unpickle by code of their own
        raise UsageError(
            f"the setup cannot be unpickled in another process ({type(error).__name__}: {error})"
        ) from None
    return setup


def _or_tell(answer: Callable[..., None], action: Callable[[], Any]) -> Any:
    """Do something of which every failure is to be told to the parent, which then ends us."""
    try:
        return action()
    except BatchFinderError as error:
        answer("error", kind=type(error).__name__, message=str(error))
    except SystemExit as error:
        message = f"the code called sys.exit({error.code!r}); take that out of the training step"
        answer("user_error", message=message, traceback="")
    except BaseException as error:  # noqa: BLE001 - told, with all of it, before the end
        message = "".join(f"{type(error).__name__}: {error}".splitlines()[:1])
        answer("user_error", message=message, traceback=user_traceback(error))
    os._exit(1)


def _take_standard_streams() -> tuple[IO[bytes], IO[str]]:
    """Keep the pipes to the parent for ourselves, whatever the user's code prints or reads."""
    orders = os.fdopen(os.dup(0), "rb")
    answers = io.TextIOWrapper(os.fdopen(os.dup(1), "wb"), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return orders, answers


def _receive(orders: IO[bytes], queue: SimpleQueue[dict[str, Any]]) -> None:
    """Hand on each order; without a parent there is nothing left to do."""
    with contextlib.suppress(OSError):
        for line in orders:
            order = json.loads(line)
            if "pickled_bytes" in order:
                order["pickled_setup"] = orders.read(order["pickled_bytes"])
            queue.put(order)
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with all that the user's code has started
    os._exit(1)


if __name__ == "__main__":
    main()
