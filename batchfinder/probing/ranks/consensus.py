"""Combine the attempts of all ranks into one, the same on every rank. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchfinder.probing.attempt import Attempt
from batchfinder.results.probe import Outcome, Probe

_WORSE = (Outcome.FITS, Outcome.OOM, Outcome.FAILED)


def check_none_raised(attempts: Sequence[Attempt | None]) -> None:
    """Raise the error that a rank raised. Every rank raises the same error.

    The message names the rank, unless all ranks raised the same error.

    Raises:
        BatchFinderError: the error of the first rank that raised one.
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

    Args:
        attempts: the attempt of each rank, by rank.
        budgets: the bytes that each rank's step may use, by rank.
        batch_size: the size that was tried.
        confirm: True if it was a confirmation.

    Returns:
        The probe of the limiting rank, with the peaks of all ranks. A failure is believed if at
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
    if worst:
        blamed.sort(key=lambda rank: not seen[rank].is_believed)
        limiting = blamed[0]
    else:
        limiting = min(blamed, key=lambda rank: budgets[rank] - (_peak(seen[rank].probe) or 0))
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
