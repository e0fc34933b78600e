"""The answer of a search. Frozen; ``reporting`` renders it."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchfinder.results.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.results.memory_model import MemoryModel
from batchfinder.results.probe import Outcome, Probe, without_place
from batchfinder.results.record import Record, Summarized
from batchfinder.results.throughput import Throughput
from batchfinder.results.version import SCHEMA_VERSION
from batchfinder.units import format_bytes, format_seconds


class Status(enum.Enum):
    """The ways in which a search may end."""

    FOUND = "found"
    """The largest size that fits, proved by a failure just above it."""
    CAPPED = "capped"
    """The requested maximum fits; nothing larger was tried."""
    NOTHING_FITS = "nothing_fits"
    """Even the smallest size does not fit; the batch size is 0."""
    INTERRUPTED = "interrupted"
    """Interrupted; the batch size is the largest that ran, 0 if none did."""
    FAILED = "failed"
    """Stopped by an error; the batch size is the largest that ran, 0 if none did."""
    TIME_LIMIT = "time_limit"
    """Stopped by the time limit; the batch size is the largest that was confirmed."""


@dataclass(frozen=True)
class NextFailure(Record):
    """The smallest batch size above the answer that was tried, and why it failed."""

    batch_size: int
    outcome: Outcome
    reason: str  # one line

    @property
    def is_in_validation(self) -> bool:
        """True if its training steps fit, and the validation after them did not."""
        return without_place(self.reason)[1]

    @property
    def what(self) -> str:
        """The batch size in words, with the validation if that failed."""
        return f"batch size {self.batch_size}" + " with its validation" * self.is_in_validation


@dataclass(frozen=True, repr=False)
class BatchSizeResult(Summarized, Record):
    """The answer of a search, with the evidence for it.

    ``int(result)`` is the batch size, ``str(result)`` a one-line summary. ``result.to_json()`` has
    every attribute under its own name.

    Attributes:
        batch_size: examples per device per forward/backward pass; 0 if nothing fits.
        status: how the search ended.
        device: the device's name, such as ``"cuda:0 NVIDIA H200"``.
        budget_bytes: memory that the search may use.
        probes: every probe, in the order they ran.
        memory_model: the lines fitted to the probes; None while fewer than two sizes fit.
        next_failure: the smallest size above the answer that failed; None if none was tried.
        confirmed_steps: full steps run at the answer from a fresh allocator; 0 if unconfirmed.
        cost_full_size_steps: cost of the search in steps at the answer's size: the examples of all
            probes divided by the answer. A failing step counts as a whole one. 0 if nothing fits.
        seconds: duration of the whole search.
        versions: the versions of python, torch, batchfinder and, if present, CUDA or HIP.
        warnings: problems the user should act on, one line each.
        notes: explanations that need no action, one line each.
        estimated_batch_size: the estimate the search started from; None if there was none.
        throughput: the speed of training at several sizes, and the smallest size that is as fast as
            any; None if it was not measured.
        mode: ``"train"``; ``"eval"`` or ``"inference"`` for forward passes without training.
        eval_batch_size: examples in each batch of the validation after every step; None without a
            validation.
        seconds_by_part: seconds of ``loading`` (PyTorch and the target), of waiting for an
            ``estimate``, of the ``steps`` of all probes, of ``restoring`` the training state, and
            of the ``rest``. Empty if not measured.
        remembered_from: the time of the earlier search that found this answer, in ISO 8601; None
            if this search found it. It is confirmed now, but its failure is the earlier one.
        is_divided: True if the ranks of a script share the batch size; else each has it.
    """

    batch_size: int
    status: Status
    device: str
    budget_bytes: int
    probes: tuple[Probe, ...]
    memory_model: MemoryModel | None
    next_failure: NextFailure | None
    confirmed_steps: int
    cost_full_size_steps: float
    seconds: float
    versions: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    estimated_batch_size: int | None = None
    mode: str = "train"
    eval_batch_size: int | None = None
    seconds_by_part: Mapping[str, float] = field(default_factory=dict)
    remembered_from: str | None = None
    throughput: Throughput | None = None
    is_divided: bool = False

    def __int__(self) -> int:
        return self.batch_size

    def __str__(self) -> str:
        how = "the largest allowed" if self.status is Status.CAPPED else self.status.value
        answer = f"batch size {self.batch_size} ({how})"
        answer = f"{answer} on {self.device} in {format_seconds(self.seconds)}"
        if self.status is not Status.NOTHING_FITS or self.next_failure is None:
            return answer
        return (
            f"{answer}: {self.next_failure.what} needs more than {format_bytes(self.budget_bytes)}"
        )

    @property
    def is_final(self) -> bool:
        """False if the search was stopped before it had its answer: a larger size may fit."""
        return self.status in (Status.FOUND, Status.CAPPED, Status.NOTHING_FITS)

    @property
    def world_size(self) -> int:
        """The number of ranks that train together; 1 if one process trains alone."""
        return max((len(probe.rank_peak_bytes) for probe in self.probes), default=0) or 1

    @property
    def rank_peak_bytes(self) -> tuple[int | None, ...]:
        """The peak of each rank at the answer, by rank; empty if one process trains alone."""
        ran = [p for p in self.probes if p.fits and p.batch_size == self.batch_size]
        return max(ran, key=lambda p: p.confirmed).rank_peak_bytes if ran else ()

    @property
    def limiting_rank(self) -> int | None:
        """The rank that prevents a larger batch size; None if one process trains alone.

        It failed above the answer, or it has the least room left at the answer.
        """
        size = self.next_failure.batch_size if self.next_failure else self.batch_size
        tried = (p.limiting_rank for p in self.probes if p.batch_size == size)
        return next((rank for rank in tried if rank is not None), None)

    def accumulation_plan(
        self,
        global_batch_size: int,
        world_size: int | None = None,
        *,
        min_batch_size: int = 1,
        multiple_of: int = 1,
    ) -> AccumulationPlan:
        """Split a global batch size into micro-batches no larger than the answer.

        With more than one accumulation step, the gradients of one micro-batch stay in memory
        during the forward pass of the next. Search with ``accumulate=True`` in that case.

        Args:
            global_batch_size: examples per optimizer step over all ranks.
            world_size: data-parallel ranks. Default: the ranks of this search.
            min_batch_size: the smallest micro-batch allowed.
            multiple_of: each micro-batch is a multiple of it.

        Returns:
            The exact split if there is one, else the nearest ones below and above.

        Raises:
            UsageError: a size is not positive, or nothing fits.
        """
        ranks = self.world_size if world_size is None else world_size
        known = (self.throughput.rate_at,) if self.throughput else ()
        return plan_accumulation(
            global_batch_size,
            self.batch_size,
            ranks,
            *known,
            min_batch_size=min_batch_size,
            multiple_of=multiple_of,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data.

        Bytes and seconds are plain numbers, unknown values are None. Besides the attributes and
        properties there is ``schema_version``: while it stays the same, names keep their meaning
        and new ones may be added.
        """
        return {
            "schema_version": SCHEMA_VERSION,
            **super().to_dict(),
            "is_final": self.is_final,
            "world_size": self.world_size,
            "rank_peak_bytes": [*self.rank_peak_bytes],
            "limiting_rank": self.limiting_rank,
        }

    def to_json(self) -> str:
        """Return the JSON object that ``batchfinder find --json`` prints."""
        return json.dumps(self.to_dict(), allow_nan=False)
