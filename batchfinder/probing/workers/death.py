"""Judge a batch size by how the worker process that ran it ended. Imports no torch."""

from __future__ import annotations

import signal

from batchfinder.errors import WorkerDiedError, WorkerGarbledError, WorkerHungError
from batchfinder.probing.attempt import Attempt
from batchfinder.results.probe import Outcome, Probe
from batchfinder.units import format_seconds


def attempt_of_death(
    death: WorkerDiedError | WorkerGarbledError | WorkerHungError,
    batch_size: int,
    confirm: bool,
    steps: int,
    seconds: float,
) -> Attempt:
    """Return the record of an attempt that ended because its process did.

    Args:
        death: the error that says how the process ended.
        batch_size: the size that the process was running.
        confirm: True if it was a confirmation.
        steps: the number of completed steps.
        seconds: the time since the attempt began.
    """
    outcome, note = Outcome.FAILED, str(death)
    if isinstance(death, WorkerHungError):
        note = (
            f"hung: stopped after {format_seconds(seconds)} in step {steps + 1}; "
            "batchfinder find --probe-timeout allows for more"
        )
    elif isinstance(death, WorkerDiedError):
        if death.signal_number == getattr(signal, "SIGKILL", 9):  # Windows has none
            outcome = Outcome.OOM
            note = "the process was killed, most likely by the system for lack of host memory"
        elif (reason := _printed_reason(death.output)) is not None:
            outcome, note = Outcome.OOM, reason
    probe = Probe(
        batch_size,
        outcome,
        steps=steps + 1,
        seconds=seconds,
        samples=batch_size * (steps + 1),
        confirmed=confirm,
        note=note,
    )
    return Attempt(probe, is_believed=isinstance(death, WorkerHungError), is_reusable=False)


def _printed_reason(output: str) -> str | None:
    """Return the out-of-memory error in the last lines of a dead process; None without one."""
    # Imported here, because they import torch, which this process does not need otherwise.
    from batchfinder.probing.devices.oom import classify_text
    from batchfinder.probing.devices.oom_table import Tier

    failure = classify_text(output)
    is_memory = failure is not None and failure.tier in (Tier.CERTAIN, Tier.PROBABLE)
    return failure.reason if failure and is_memory else None
