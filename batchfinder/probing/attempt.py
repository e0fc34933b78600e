"""One batch size tried once: the record of how it ended, and what its steps have shown.

Imports no torch until a probe is made of a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from batchfinder import errors
from batchfinder.errors import (
    BatchFinderError,
    UserCodeError,
    WorkerError,
    WorkerReleasedError,
)
from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome, Probe

if TYPE_CHECKING:
    from batchfinder.probing.devices.oom import Failure

# A rank's step raises one of these when another rank has gone. The first stand in every error of
# gloo's connections, the others in ncclRemoteError and in ProcessGroupNCCL's words for an abort.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclresult-t
_PEER_LOST = re.compile(
    r"gloo/(transport|rendezvous)/|connectFullMesh failed|ncclRemoteError"
    r"|remote process exited|NCCL communicator was aborted|Connection (reset|closed) by peer"
)


class Recording(NamedTuple):
    """What a confirmation asked the caching allocator for.

    Attributes:
        held: bytes of each block that was in use before, by address.
        steps: the events of each step. An event is the bytes that were asked for, or ``~i`` for the
            release of the i-th block, counted through the blocks held and all steps.
    """

    held: Sequence[int]
    steps: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Attempt:
    """A probe, and what it says of the process that it ran in.

    Attributes:
        probe: the outcome.
        is_believed: whether a failure speaks for the size; else only a second one in a fresh
            process does.
        is_reusable: whether the process can be used for another probe.
        is_broken: whether nothing runs on the device any more in this process.
        warnings: texts for the user.
        restoring_seconds: the time it took to put the training state back.
        error: what was raised instead of a probe; None if nothing was.
        lost: why the process was cut off through no fault of its own; empty if it was not.
        recording: of a confirmation that fitted, on CUDA; None: it could not be recorded.
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

    @classmethod
    def of_error(cls, error: BatchFinderError, batch_size: int = 0) -> Attempt:
        """The record where an error came instead of a probe."""
        text = str(error)
        probe = Probe(batch_size, Outcome.FAILED, steps=0, seconds=0.0, note=text)
        if isinstance(error, WorkerReleasedError) or _PEER_LOST.search(text):
            return cls(probe, is_believed=False, is_reusable=False, lost=text)
        return cls(probe, is_believed=False, is_reusable=False, error=error)

    @property
    def is_doubtful(self) -> bool:
        """Whether the size has to be tried again in a fresh process."""
        return not self.probe.fits and not self.is_believed

    @property
    def has_ended(self) -> bool:
        """Whether the probe came to an end of its own, good or bad."""
        return self.error is None and not self.lost

    def to_dict(self) -> dict[str, Any]:
        """The attempt as plain data, ready for JSON."""
        return {
            "probe": self.probe.to_dict(),
            "is_believed": self.is_believed,
            "is_reusable": self.is_reusable,
            "is_broken": self.is_broken,
            "warnings": [*self.warnings],
            "restoring_seconds": self.restoring_seconds,
            "error": None if self.error is None else error_to_dict(self.error),
            "lost": self.lost,
            "recording": self.recording,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Attempt:
        """The inverse of :meth:`to_dict`.

        Raises:
            KeyError, ValueError, TypeError: the data is not that of an attempt.
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


def error_to_dict(error: BatchFinderError) -> dict[str, str]:
    """An error of ours as plain data, ready for JSON."""
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": getattr(error, "user_traceback", ""),
    }


def error_from_dict(data: Mapping[str, str]) -> BatchFinderError:
    """The inverse of :func:`error_to_dict`."""
    if data["kind"] == UserCodeError.__name__:
        return UserCodeError(data["message"], data["traceback"])
    kind = getattr(errors, data["kind"], WorkerError)
    error: BatchFinderError = kind(data["message"])
    return error


@dataclass
class Run:
    """The readings of one probe's steps so far."""

    steps: int = 0
    samples: int = 0
    steps_seconds: list[float] = field(default_factory=list)
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    phase_peak_bytes: dict[Phase, int] = field(default_factory=dict)
    allocation_retries: int = 0
    in_use_after_steps: list[int] = field(default_factory=list)
    failure: Failure | None = None
    where: str = ""
    note: str = ""
    recording: Recording | None = None

    @property
    def is_only_probable(self) -> bool:
        """True for a failure that means memory only if it comes again."""
        from batchfinder.probing.devices.oom_table import Tier  # needs torch

        return self.failure is not None and self.failure.tier is Tier.PROBABLE


def to_probe(run: Run, batch_size: int, confirm: bool, seconds: float) -> Probe:
    """The probe that a run amounts to, once it has ended."""
    from batchfinder.probing.devices.oom_table import Tier  # needs torch

    outcome, note = Outcome.FITS, run.note
    if run.failure is not None:
        is_memory = run.failure.tier in (Tier.CERTAIN, Tier.PROBABLE)
        outcome = Outcome.OOM if is_memory else Outcome.FAILED
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
        phase_peak_bytes=run.phase_peak_bytes,
        allocation_retries=run.allocation_retries if run.failure is None else 0,
        confirmed=confirm,
        note=note,
    )
