"""The record of one tried batch size: how it ended and what its steps showed. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchfinder import errors
from batchfinder.errors import BatchFinderError, UserCodeError, WorkerError, WorkerReleasedError
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome, Probe
from batchfinder.search.prober import Recording as Recording

if TYPE_CHECKING:
    from batchfinder.probing.devices.oom import Failure
    from batchfinder.probing.devices.oom_table import Tier
    from batchfinder.probing.recording import Recorder

# A rank's step raises an error with one of these texts when another rank has ended. Every error of
# gloo's connections has one of the first. ncclRemoteError and an abort by ProcessGroupNCCL have the
# others.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclresult-t
_PEER_LOST = re.compile(
    r"gloo/(transport|rendezvous)/|connectFullMesh failed|ncclRemoteError"
    r"|remote process exited|NCCL communicator was aborted|Connection (reset|closed) by peer"
)


@dataclass(frozen=True)
class Attempt:
    """A probe, and the state in which it left its process.

    Attributes:
        probe: the outcome.
        is_believed: True if a failure proves that the size fails. If False, only a second failure
            in a fresh process proves it.
        is_reusable: True if the process can run another probe.
        is_broken: True if nothing can run on the device in this process any more.
        warnings: texts for the user.
        restoring_seconds: time spent on restoring the training state.
        error: the error that was raised instead of a probe; None if there was none.
        lost: the reason why this process was stopped although it did not fail itself; empty if it
            was not stopped.
        recording: the memory requests of a confirmation that fitted, on CUDA; None if there is no
            recording.
        budget_bytes: memory that later probes may use; None if it is unknown.
    """

    probe: Probe
    is_believed: bool
    is_reusable: bool
    is_broken: bool = False
    warnings: tuple[str, ...] = ()
    restoring_seconds: float = 0.0
    error: BatchFinderError | None = None
    lost: str = ""
    recording: Recording | None = None
    budget_bytes: int | None = None

    @classmethod
    def of_error(cls, error: BatchFinderError, batch_size: int = 0) -> Attempt:
        """Return the record of an error that was raised instead of a probe."""
        text = str(error)
        probe = Probe(batch_size, Outcome.FAILED, steps=0, seconds=0.0, note=text)
        if isinstance(error, WorkerReleasedError) or _PEER_LOST.search(text):
            return cls(probe, is_believed=False, is_reusable=False, lost=text)
        return cls(probe, is_believed=False, is_reusable=False, error=error)

    @property
    def is_doubtful(self) -> bool:
        """True if the size must be tried again in a fresh process."""
        return not self.probe.fits and not self.is_believed

    @property
    def has_ended(self) -> bool:
        """True if the probe ran to its own end, whatever the outcome."""
        return self.error is None and not self.lost

    def to_dict(self) -> dict[str, Any]:
        """Return the attempt as plain data, ready for JSON."""
        return {
            **vars(self),
            "probe": self.probe.to_dict(),
            "error": None if self.error is None else error_to_dict(self.error),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Attempt:
        """Return the attempt from the data of :meth:`to_dict`.

        Raises:
            KeyError, ValueError, TypeError: the data does not describe an attempt.
        """
        known = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(
            **{
                **known,
                "probe": Probe.from_dict(data["probe"]),
                "warnings": tuple(data["warnings"]),
                "error": data["error"] and error_from_dict(data["error"]),
                "recording": data["recording"] and Recording(*data["recording"]),
            }
        )


def error_to_dict(error: BatchFinderError) -> dict[str, Any]:
    """Return one of batchfinder's errors as plain data, ready for JSON."""
    return {"kind": type(error).__name__, "message": str(error), "facts": vars(error)}


def error_from_dict(data: Mapping[str, Any]) -> BatchFinderError:
    """Return the error from the data of :func:`error_to_dict`."""
    if data["kind"] == UserCodeError.__name__:
        return UserCodeError(data["message"], data["facts"]["user_traceback"])
    kind = getattr(errors, data["kind"], WorkerError)
    # Without its constructor, which may make the message from other arguments.
    error: BatchFinderError = kind.__new__(kind, data["message"])
    vars(error).update(data["facts"])
    return error


@dataclass
class Run:
    """The readings of one probe's steps so far.

    If the first step ``tries_kernels``, as with ``torch.backends.cudnn.benchmark``, each gets a
    workspace as large as fits. No later step needs it, so only they show what grows with the size.
    """

    tries_kernels: bool = False
    steps: int = 0
    samples: int = 0
    steps_seconds: list[float] = field(default_factory=list)
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    outside_bytes: int = 0
    phase_peak_bytes: dict[Phase, int] = field(default_factory=dict)
    allocation_retries: int = 0
    in_use_after_steps: list[int] = field(default_factory=list)
    failure: Failure | None = None
    where: str = ""
    note: str = ""
    recorder: Recorder | None = None
    steps_differ: bool = False

    def begin_step(self, samples: int) -> None:
        """Note that a step begins."""
        self.steps += 1
        self.samples += samples
        if self.tries_kernels and self.steps == 2:
            self.allocated_bytes = self.reserved_bytes = 0
            self.phase_peak_bytes.clear()

    def recording(self, probe: Probe, *, batches_vary: bool) -> Recording | None:
        """Return the requests of the steps that ended; None if they were not recorded."""
        recorded = self.recorder.recording() if self.recorder else None
        if not recorded:
            return None
        return Recording(**recorded, batches_vary=batches_vary, ran_out=not probe.fits)

    @property
    def tier(self) -> Tier | None:
        """What its failure says about memory; None without one."""
        return self.failure.tier if self.failure else None


def to_probe(run: Run, batch_size: int, confirm: bool, seconds: float) -> Probe:
    """Return the probe of a run that has ended."""
    outcome, note = Outcome.FITS, run.note
    if run.failure is not None:
        outcome = Outcome.OOM if run.failure.is_memory else Outcome.FAILED
        note = run.where + run.failure.reason
    elif run.note:
        outcome = Outcome.OOM
    return Probe(
        batch_size,
        outcome,
        steps=run.steps,
        samples=run.samples,
        seconds=seconds,
        step_seconds=run.steps_seconds[-1] if run.steps_seconds else None,
        steps_seconds=tuple(run.steps_seconds),
        peak_allocated_bytes=run.allocated_bytes or None,
        peak_reserved_bytes=run.reserved_bytes or None,
        outside_bytes=run.outside_bytes or None,
        phase_peak_bytes=run.phase_peak_bytes,
        allocation_retries=run.allocation_retries if run.failure is None else 0,
        confirmed=confirm,
        note=note,
        steps_differ=run.steps_differ,
    )
