"""From what each rank saw of a probe to one verdict, the same on every rank. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from batchfinder import errors
from batchfinder.errors import BatchFinderError, UserCodeError, WorkerReleasedError
from batchfinder.probing.workers.verdict import Verdict
from batchfinder.results.result import Outcome, Probe

_WORSE = (Outcome.FITS, Outcome.OOM, Outcome.FAILED)

# What a rank's step raises when another one has gone: gloo's and NCCL's words for it. The first
# stand in every error of gloo's connections, the others in ncclRemoteError and in what
# ProcessGroupNCCL says when it aborts.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html#ncclresult-t
_PEER_LOST = re.compile(
    r"gloo/(transport|rendezvous)/|connectFullMesh failed|ncclRemoteError"
    r"|remote process exited|NCCL communicator was aborted|Connection (reset|closed) by peer"
)


@dataclass(frozen=True)
class RankReport:
    """What one rank saw of a probe, or of the loading before it.

    Attributes:
        verdict: how the probe ended; None if it has no end of its own.
        error: what was raised instead; None if nothing was.
        lost: why the rank was cut off, through no fault of its own; empty if it was not.
        warnings: what the user should know.
    """

    verdict: Verdict | None = None
    error: BatchFinderError | None = None
    lost: str = ""
    warnings: tuple[str, ...] = field(default=())

    @classmethod
    def of_error(cls, error: BatchFinderError) -> RankReport:
        """The report where an error came instead of a verdict."""
        text = str(error)
        if isinstance(error, WorkerReleasedError) or _PEER_LOST.search(text):
            return cls(lost=text)
        return cls(error=error)

    @property
    def is_good(self) -> bool:
        """Whether nothing speaks against the size."""
        has_failed = self.verdict is not None and not self.verdict.probe.fits
        return not (has_failed or self.error or self.lost)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        verdict, error = self.verdict, self.error
        return {
            "probe": verdict and verdict.probe.to_dict(),
            "is_certain": verdict and verdict.is_certain,
            "is_reusable": verdict and verdict.is_reusable,
            "kind": type(error).__name__ if error else "",
            "message": str(error) if error else "",
            "traceback": getattr(error, "user_traceback", ""),
            "lost": self.lost,
            "warnings": [*self.warnings],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankReport:
        """The inverse of :meth:`to_dict`."""
        verdict = error = None
        if data["probe"]:
            verdict = Verdict(
                Probe.from_dict(data["probe"]), data["is_certain"], data["is_reusable"]
            )
        if data["kind"] == UserCodeError.__name__:
            error = UserCodeError(data["message"], data["traceback"])
        elif data["kind"]:
            error = getattr(errors, data["kind"])(data["message"])
        return cls(verdict, error, data["lost"], tuple(data["warnings"]))


def check_none_raised(reports: Sequence[RankReport]) -> None:
    """Raise what a rank raised, on every rank; it names the rank unless all raised the same.

    Raises:
        BatchFinderError: of the same kind as the first one.
    """
    raised = [(rank, report.error) for rank, report in enumerate(reports) if report.error]
    if not raised:
        return
    rank, error = raised[0]
    if len(raised) < len(reports) or len({str(other) for _, other in raised}) > 1:
        error.args = (f"on rank {rank}: {error}",)
    raise error


def consensus(
    reports: Sequence[RankReport], budgets: Sequence[int], batch_size: int, confirm: bool
) -> Verdict:
    """The verdict of all ranks: the worst of theirs, FAILED before OOM before FITS.

    Args:
        reports: by rank.
        budgets: what each rank's step may use, in bytes.
        batch_size: the size tried.
        confirm: whether it was a confirmation.

    Returns:
        The probe of the rank that limits, with the peaks of all. It is certain if a rank that ended
        as badly as any is; the workers can be used again only if all of them can.

    Raises:
        BatchFinderError: what a rank raised.
    """
    check_none_raised(reports)
    seen = {rank: report.verdict for rank, report in enumerate(reports) if report.verdict}
    worst = max((_badness(verdict) for verdict in seen.values()), default=0)
    lost = [report.lost for report in reports if report.lost]
    if lost and not worst:
        # Nobody has a reason of their own: the connection between them broke.
        note = f"the ranks lost each other: {lost[0]}"
        probe = Probe(batch_size, Outcome.FAILED, 1, 0.0, batch_size, confirmed=confirm, note=note)
        peaks = (None,) * len(reports)
        return Verdict(replace(probe, rank_peak_bytes=peaks), is_certain=False, is_reusable=False)
    blamed = [rank for rank, verdict in seen.items() if _badness(verdict) == worst]
    if worst:
        blamed.sort(key=lambda rank: not seen[rank].is_certain)
        limiting = blamed[0]
    else:
        limiting = min(blamed, key=lambda rank: budgets[rank] - (_peak(seen[rank].probe) or 0))
    probes = [verdict.probe for verdict in seen.values()]
    probe = seen[limiting].probe
    step_seconds = [p.step_seconds for p in probes if p.step_seconds is not None]
    probe = replace(
        probe,
        seconds=max(p.seconds for p in probes),
        step_seconds=max(step_seconds, default=None),
        note=f"rank {limiting}: {probe.note}" if probe.note else "",
        rank_peak_bytes=tuple(
            _peak(seen[rank].probe) if rank in seen else None for rank in range(len(reports))
        ),
        limiting_rank=limiting,
    )
    is_certain = not worst or seen[limiting].is_certain
    return Verdict(probe, is_certain, not worst and all(v.is_reusable for v in seen.values()))


def _badness(verdict: Verdict) -> int:
    return _WORSE.index(verdict.probe.outcome)


def _peak(probe: Probe) -> int | None:
    """In the bytes that count against the budget."""
    return max(probe.phase_peak_bytes.values(), default=None) or probe.peak_allocated_bytes
