"""What a probe has shown: while it runs, and once it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchfinder.probing.devices.oom import Failure
from batchfinder.probing.devices.oom_table import Tier
from batchfinder.results.memory_model import Phase
from batchfinder.results.result import Outcome, Probe


@dataclass(frozen=True)
class Attempt:
    """A probe, and what it says of the process it ran in.

    Attributes:
        probe: the outcome.
        was_clean: the process was at its baseline before the probe: only then is OOM a verdict.
        is_reusable: the process can be used for another probe.
        is_broken: nothing runs on the device any more in this process.
    """

    probe: Probe
    was_clean: bool
    is_reusable: bool
    is_broken: bool = False


@dataclass
class Run:
    """What the steps of one probe have shown so far."""

    steps: int = 0
    samples: int = 0
    step_seconds: float | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    phase_peak_bytes: dict[Phase, int] = field(default_factory=dict)
    allocation_retries: int = 0
    in_use_after_steps: list[int] = field(default_factory=list)
    failure: Failure | None = None
    note: str = ""


def to_probe(run: Run, batch_size: int, confirm: bool, seconds: float) -> Probe:
    """The probe that a run amounts to, once it has ended."""
    outcome, note = Outcome.FITS, run.note
    if run.failure is not None:
        is_memory = run.failure.tier in (Tier.CERTAIN, Tier.PROBABLE)
        outcome = Outcome.OOM if is_memory else Outcome.FAILED
        note = run.failure.reason
    elif run.note:
        outcome = Outcome.OOM
    return Probe(
        batch_size,
        outcome,
        steps=run.steps,
        samples=run.samples,
        seconds=seconds,
        step_seconds=run.step_seconds,
        peak_allocated_bytes=run.allocated_bytes or None,
        peak_reserved_bytes=run.reserved_bytes or None,
        phase_peak_bytes=run.phase_peak_bytes,
        allocation_retries=run.allocation_retries if run.failure is None else 0,
        confirmed=confirm,
        note=note,
    )
