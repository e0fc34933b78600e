"""What the probers of several ranks have in common: one device for people, one verdict for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchfinder.probing.ranks.consensus import RankReport, consensus
from batchfinder.probing.ranks.meeting import Meeting, check_same
from batchfinder.probing.workers.verdict import Verdict
from batchfinder.results.result import BatchSizeResult

ONE_RANK_WARNING = (
    "there is only one rank, so the answer holds for one; start it with torchrun "
    "--nproc-per-node N for N"
)


class RankedProber:
    """A prober whose answers are the same on every rank.

    Args:
        meeting: of the ranks.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.warnings: tuple[str, ...] = ()
        self._meeting = meeting

    def agreed(self, result: BatchSizeResult) -> BatchSizeResult:
        """The same result for every rank: as they agreed on all else, only the clocks differ."""
        return replace(result, seconds=self._meeting.gather(result.seconds)[0])

    def _agree_to_try(self, batch_size: int, confirm: bool) -> None:
        """Check that all ranks are at the same point of the same search.

        Raises:
            RankError: they are not, as their bounds differ, or a rank is missing.
        """
        size = f"{batch_size}, to be confirmed" if confirm else str(batch_size)
        self._meeting.agree({"the batch size to try, and so on the bounds of the search": size})

    def _tell(self, told: list[dict[str, Any]], strategy: str | None) -> None:
        """Take what each rank told of its device as this prober's own, the same on every rank."""
        check_same([one["facts"] for one in told])
        self._budgets = [one["budget_bytes"] for one in told]
        smallest = told[self._budgets.index(min(self._budgets))]
        self.device = _device_name(told, strategy, self._meeting.job.local_world_size)
        self.budget_bytes: int = smallest["budget_bytes"]
        self.capacity_bytes: int = smallest["capacity_bytes"]
        self.used_by_others_bytes: int = smallest["used_by_others_bytes"]
        self.is_repeatable = all(one["is_repeatable"] for one in told)
        self.versions: dict[str, str] = told[0]["versions"]
        for one in told:
            if one["limit_warning"]:
                self.warn(one["limit_warning"])
        if len(told) == 1:
            self.warn(ONE_RANK_WARNING)

    def _verdict(self, said: list[dict[str, Any]], batch_size: int, confirm: bool) -> Verdict:
        """The verdict of all ranks on a probe that each of them has reported."""
        reports = [RankReport.from_dict(report) for report in said]
        for report in reports:
            self.warn(*report.warnings)
        return consensus(reports, self._budgets, batch_size, confirm)

    def warn(self, *warnings: str) -> None:
        """Add warnings to those of the result, each once."""
        self.warnings = tuple(dict.fromkeys((*self.warnings, *warnings)))


def _device_name(told: list[dict[str, Any]], strategy: str | None, sharing: int) -> str:
    """Such as "8 x NVIDIA H200 (ddp)"."""
    names = dict.fromkeys(one["device"].partition(" ")[2] or one["device"] for one in told)
    name = f"{len(told)} x {', '.join(names)} ({strategy})"
    shares_memory = sharing > 1 and told[0]["facts"]["the kind of device"] == "cpu"
    return f"{name}, each with 1/{sharing} of the memory" if shares_memory else name
