"""What an attempt of a worker says of a batch size. Imports no torch."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchfinder import errors
from batchfinder.errors import (
    BatchFinderError,
    UserCodeError,
    WorkerDiedError,
    WorkerError,
    WorkerGarbledError,
    WorkerHungError,
)
from batchfinder.results.result import Outcome, Probe
from batchfinder.units import format_seconds


@dataclass(frozen=True)
class Verdict:
    """A probe, and what it says beyond its own outcome.

    Attributes:
        probe: how it ended.
        is_certain: whether it speaks for the size; else only a second one in a fresh worker does.
        is_reusable: whether the worker can be used for another probe.
    """

    probe: Probe
    is_certain: bool
    is_reusable: bool


def verdict_of_death(
    death: WorkerDiedError | WorkerGarbledError | WorkerHungError,
    batch_size: int,
    confirm: bool,
    steps: int,
    seconds: float,
) -> Verdict:
    """What the end of a worker says of the size that it was running."""
    outcome, note = Outcome.FAILED, str(death)
    if isinstance(death, WorkerHungError):
        note = (
            f"hung: stopped after {format_seconds(seconds)} in step {steps + 1}; "
            "batchfinder find --probe-timeout allows for more"
        )
    elif isinstance(death, WorkerDiedError):
        if death.signal_number == getattr(signal, "SIGKILL", 9):  # Windows has none
            outcome = Outcome.OOM
            note = "the process was killed, most likely by the system for want of host memory"
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
    return Verdict(probe, is_certain=isinstance(death, WorkerHungError), is_reusable=False)


def _printed_reason(output: str) -> str | None:
    """Why a process died, if what it printed last says that it ran out of memory."""
    # It needs torch, for which this process has no other use.
    from batchfinder.probing.devices.oom import classify_text
    from batchfinder.probing.devices.oom_table import Tier

    failure = classify_text(output)
    is_memory = failure is not None and failure.tier in (Tier.CERTAIN, Tier.PROBABLE)
    return failure.reason if failure and is_memory else None


def error_of(answer: Mapping[str, Any]) -> BatchFinderError:
    """The error that a worker told of, as an exception of ours."""
    if answer["answer"] == "error":
        kind = getattr(errors, str(answer["kind"]), WorkerError)
        error: BatchFinderError = kind(answer["message"])
        return error
    return UserCodeError(answer["message"], answer.get("traceback", ""))
