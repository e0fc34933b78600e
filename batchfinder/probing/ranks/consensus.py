"""One place and one attempt for all ranks of a job, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from batchfinder.errors import RankError
from batchfinder.probing.attempt import Attempt
from batchfinder.probing.place import AtPlace, Place
from batchfinder.probing.ranks.job import sharing
from batchfinder.probing.ranks.meeting import Meeting, check_same
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.result import BatchSizeResult

ONE_RANK_WARNING = (
    "there is only one rank, so the answer holds for one; start it with torchrun "
    "--nproc-per-node N for N"
)

_WORSE = (Outcome.FITS, Outcome.OOM, Outcome.FAILED)


def check_none_raised(attempts: Sequence[Attempt | None]) -> None:
    """Raise the error of the first rank that raised one, the same on every rank.

    The message names the rank, unless all ranks raised the same error.
    """
    raised = [(rank, one.error) for rank, one in enumerate(attempts) if one and one.error]
    if not raised:
        return
    rank, error = raised[0]
    if len(raised) < len(attempts) or len({str(other) for _, other in raised}) > 1:
        error.args = (f"on rank {rank}: {error}",)
    raise error


def consensus(
    attempts: Sequence[Attempt], budgets: Sequence[int], batch_size: int, confirm: bool
) -> Attempt:
    """Return one attempt for all ranks: the worst one, FAILED before OOM before FITS.

    Its probe is that of the limiting rank, with the peaks of all ranks. A failure is believed if at
    least one rank with the worst outcome is believed. Workers are reusable only if all are.

    Raises:
        BatchFinderError: a rank raised it.
    """
    check_none_raised(attempts)
    seen = {rank: attempt for rank, attempt in enumerate(attempts) if attempt.has_ended}
    worst = max((_badness(attempt) for attempt in seen.values()), default=0)
    lost = [attempt.lost for attempt in attempts if attempt.lost]
    if lost and not worst:
        # No rank failed by itself, so the connection between them broke.
        note = f"the ranks lost each other: {lost[0]}"
        probe = Probe(batch_size, Outcome.FAILED, 1, 0.0, batch_size, confirmed=confirm, note=note)
        peaks = (None,) * len(attempts)
        return Attempt(replace(probe, rank_peak_bytes=peaks), is_believed=False, is_reusable=False)
    blamed = [rank for rank, attempt in seen.items() if _badness(attempt) == worst]
    limiting = min(
        blamed,
        key=lambda rank: (
            worst > 0 and not seen[rank].is_believed,
            budgets[rank] - (_peak(seen[rank].probe) or 0),
        ),
    )
    probes = [attempt.probe for attempt in seen.values()]
    probe = seen[limiting].probe
    step_seconds = [p.step_seconds for p in probes if p.step_seconds is not None]
    probe = replace(
        probe,
        seconds=max(p.seconds for p in probes),
        step_seconds=max(step_seconds, default=None),
        note=f"rank {limiting}: {probe.note}" if probe.note else "",
        rank_peak_bytes=tuple(
            _peak(seen[rank].probe) if rank in seen else None for rank in range(len(attempts))
        ),
        limiting_rank=limiting,
    )
    return Attempt(
        probe,
        is_believed=not worst or seen[limiting].is_believed,
        is_reusable=not worst and all(attempt.is_reusable for attempt in seen.values()),
        restoring_seconds=max(attempt.restoring_seconds for attempt in seen.values()),
    )


def _badness(attempt: Attempt) -> int:
    return _WORSE.index(attempt.probe.outcome)


def _peak(probe: Probe) -> int | None:
    """Return the peak in the bytes that the budget counts; None if it was not read."""
    return max(probe.phase_peak_bytes.values(), default=None) or probe.peak_allocated_bytes


class RankedProber(AtPlace):
    """A prober whose answers are the same on every rank."""

    meeting: Meeting
    _budgets: list[int]

    def agreed(self, result: BatchSizeResult) -> BatchSizeResult:
        """Return the result with the times of rank 0. All else is equal on every rank already."""
        clocks = self.meeting.gather([result.seconds, dict(result.seconds_by_part)])[0]
        return replace(result, seconds=clocks[0], seconds_by_part=clocks[1])

    def _agree_to_try(self, batch_size: int, confirm: bool) -> None:
        """Check that all ranks are at the same point of the same search.

        Raises:
            RankError: their sizes differ, because their bounds do, or a rank is missing.
        """
        size = f"{batch_size}, to be confirmed" if confirm else str(batch_size)
        self.meeting.agree({"the batch size to try, and so on the bounds of the search": size})

    def _common_place(
        self, own: Place | Attempt, warnings: Sequence[str], strategy: str | None
    ) -> Place:
        """Return one place for all ranks, that of the smallest budget.

        Each rank sends its own place, or the record of its error; and texts for the user.

        Raises:
            BatchFinderError: a rank raised it, the ranks' facts differ, or they lost each other.
        """
        place = asdict(own) if isinstance(own, Place) else None
        failed = own.to_dict() if isinstance(own, Attempt) else None
        said = self.meeting.gather([failed, place, [*warnings]])
        failures = [failure and Attempt.from_dict(failure) for failure, _, _ in said]
        check_none_raised(failures)
        lost = next((failure.lost for failure in failures if failure), None)
        if lost is not None:
            raise RankError(
                f"the workers could not form a process group: {lost}. Try NCCL_DEBUG=INFO or "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL to see more"
            )
        for _, _, texts in said:
            self.notes.add(*texts)
        places = [Place(**one) for _, one, _ in said]
        check_same([place.facts for place in places])
        self._budgets = [place.budget_bytes for place in places]
        self.notes.add(*(place.limit_warning for place in places))
        if len(places) == 1:
            self.notes.add(ONE_RANK_WARNING)
        return replace(
            places[self._budgets.index(min(self._budgets))],
            device=_device_name(places, strategy, self.meeting.job.local_world_size),
            is_repeatable=all(place.is_repeatable for place in places),
            versions=places[0].versions,
        )

    def _consensus(self, said: list[dict[str, Any]], batch_size: int, confirm: bool) -> Attempt:
        """Combine the attempts that all ranks have sent into one."""
        attempts = [Attempt.from_dict(attempt) for attempt in said]
        for attempt in attempts:
            self.notes.add(*attempt.warnings)
        known = zip(attempts, self._budgets, strict=True)
        self._budgets = [attempt.budget_bytes or budget for attempt, budget in known]
        self.lower_budget(min(self._budgets))
        return consensus(attempts, self._budgets, batch_size, confirm)


def _device_name(places: Sequence[Place], strategy: str | None, ranks: int) -> str:
    """Return the name of the devices of all ranks, such as "8 x NVIDIA H200 (ddp)"."""
    names = dict.fromkeys(place.device.partition(" ")[2] or place.device for place in places)
    name = f"{len(places)} x {', '.join(names)} ({strategy})"
    return sharing(name, ranks) if places[0].facts["the kind of device"] == "cpu" else name
