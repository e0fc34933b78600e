"""The common part of probers with several ranks: one place and one attempt for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchfinder.probing.attempt import Attempt
from batchfinder.probing.notes import Notes
from batchfinder.probing.place import AtPlace, Place
from batchfinder.probing.ranks.consensus import consensus
from batchfinder.probing.ranks.meeting import Meeting, check_same
from batchfinder.results.result import BatchSizeResult

ONE_RANK_WARNING = (
    "there is only one rank, so the answer holds for one; start it with torchrun "
    "--nproc-per-node N for N"
)


class RankedProber(AtPlace):
    """A prober whose answers are the same on every rank.

    Attributes:
        meeting: the meeting of the ranks.
        notes: texts for the user.
    """

    meeting: Meeting
    notes: Notes
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

    def _common_place(self, places: Sequence[Place], strategy: str | None) -> Place:
        """Return one place for all ranks: the one with the smallest budget."""
        check_same([place.facts for place in places])
        self._budgets = [place.budget_bytes for place in places]
        self.notes.add(*(place.limit_warning for place in places if place.limit_warning))
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
        return consensus(attempts, self._budgets, batch_size, confirm)


def _device_name(places: Sequence[Place], strategy: str | None, sharing: int) -> str:
    """Return the name of the devices of all ranks, such as "8 x NVIDIA H200 (ddp)"."""
    names = dict.fromkeys(place.device.partition(" ")[2] or place.device for place in places)
    name = f"{len(places)} x {', '.join(names)} ({strategy})"
    shares_memory = sharing > 1 and places[0].facts["the kind of device"] == "cpu"
    return f"{name}, each with 1/{sharing} of the memory" if shares_memory else name
