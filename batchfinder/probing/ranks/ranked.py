"""What the probers of several ranks have in common: one place for people, one attempt for all."""

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
        meeting: of the ranks.
        notes: texts for the user.
    """

    meeting: Meeting
    notes: Notes
    _budgets: list[int]

    def agreed(self, result: BatchSizeResult) -> BatchSizeResult:
        """The same result for every rank: as they agreed on all else, only the clocks differ."""
        clocks = self.meeting.gather([result.seconds, dict(result.seconds_by_part)])[0]
        return replace(result, seconds=clocks[0], seconds_by_part=clocks[1])

    def _agree_to_try(self, batch_size: int, confirm: bool) -> None:
        """Check that all ranks are at the same point of the same search.

        Raises:
            RankError: they are not, as their bounds differ, or a rank is missing.
        """
        size = f"{batch_size}, to be confirmed" if confirm else str(batch_size)
        self.meeting.agree({"the batch size to try, and so on the bounds of the search": size})

    def _common_place(self, places: Sequence[Place], strategy: str | None) -> Place:
        """The place of the whole search, the same on every rank: that with the least memory."""
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
        """The attempt of all ranks, of which each has said its own."""
        attempts = [Attempt.from_dict(attempt) for attempt in said]
        for attempt in attempts:
            self.notes.add(*attempt.warnings)
        return consensus(attempts, self._budgets, batch_size, confirm)


def _device_name(places: Sequence[Place], strategy: str | None, sharing: int) -> str:
    """Such as "8 x NVIDIA H200 (ddp)"."""
    names = dict.fromkeys(place.device.partition(" ")[2] or place.device for place in places)
    name = f"{len(places)} x {', '.join(names)} ({strategy})"
    shares_memory = sharing > 1 and places[0].facts["the kind of device"] == "cpu"
    return f"{name}, each with 1/{sharing} of the memory" if shares_memory else name
