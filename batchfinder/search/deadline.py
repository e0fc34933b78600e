"""End a search in time, with a confirmed size if possible. Imports no torch."""

from __future__ import annotations

import time
from bisect import bisect_right
from functools import partial

from batchfinder.results.probe import Probe
from batchfinder.search.bounds import UNLIMITED_BATCH_SIZE
from batchfinder.search.bracket import Bracket
from batchfinder.search.plan import Move
from batchfinder.units import check_seconds

# Plan with this share of the time left: steps near the memory limit take longer than predicted.
SPENT = 0.8

# Steps of a confirmation (3 if it is steady at once, 6 on the CPU, seldom more), and of a probe.
CONFIRM_STEPS, PROBE_STEPS = 6, 2

# A confirmation that uses less than this share of the time left comes at once: the next size may
# hang until the end.
CHEAP = 0.05

# A last confirmation that uses up the time is worth it only at a size larger by this factor.
WORTH = 1.25


class Deadline:
    """Decide before each move whether it still ends in time.

    Args:
        seconds: how long the search may take from now on.

    Example:
        >>> deadline = Deadline(60)
        >>> 59 < deadline.seconds_left() <= 60
        True
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._overhead = 0.0
        self._step_seconds: dict[int, float] = {}

    def seconds_left(self) -> float:
        """Return how many seconds are left."""
        return self._end - time.monotonic()

    def note(self, probe: Probe, seconds: float) -> None:
        """Learn from a probe how long moves last.

        Args:
            probe: a probe that has ended.
            seconds: its duration, including everything before its first step.
        """
        if not probe.fits or not probe.step_seconds:
            return
        spent = max(seconds, probe.seconds)
        self._overhead = max(self._overhead, spent - probe.steps * probe.step_seconds)
        self._step_seconds[probe.batch_size] = probe.step_seconds

    def move(self, known: Bracket, wanted: Move) -> Move | None:
        """Return the move to make instead of the one wanted; None to end the search.

        Until a size is confirmed, time is reserved to confirm the largest size that ran.

        Args:
            known: the bracket of the search.
            wanted: the move that the search would make without a limit.
        """
        if not self._step_seconds:
            return wanted  # no duration of a step is known yet
        left = SPENT * self.seconds_left()
        is_confirmed = known.low_confirmed >= known.bounds.first
        reserve = 0.0
        if not is_confirmed and not (wanted.confirm and wanted.size <= known.ran):
            reserve = self._predict(known.ran, confirm=True)
            if known.bounds.first <= known.ran and reserve < CHEAP * left:
                return Move(known.ran, True)
        if self._predict(*wanted) + reserve <= left:
            return wanted
        size = min(wanted.size if is_confirmed else known.ran, self._largest_within(left))
        size = known.bounds.at_most(size)
        if not is_confirmed:
            # It may be too late for any size. The smallest one that ran has the best chance.
            ran = [ran for ran in known.fits if ran < known.high]
            size = max(size, min(ran, default=0))
            return Move(size, True) if size >= known.bounds.first else None
        return Move(size, True) if size > WORTH * known.low_confirmed else None

    def _predict(self, size: int, confirm: bool) -> float:
        steps = CONFIRM_STEPS if confirm else PROBE_STEPS
        return self._overhead + steps * self._predict_step(size)

    def _predict_step(self, size: int) -> float:
        """Predict the seconds of a step: on a line through known sizes, in proportion beyond."""
        smallest, largest = min(self._step_seconds), max(self._step_seconds)
        least, most = self._step_seconds[smallest], self._step_seconds[largest]
        if size >= largest:
            return most * size / largest
        rise = max(0.0, most - least) / (largest - smallest)
        return least + rise * max(0, size - smallest)

    def _largest_within(self, seconds: float) -> int:
        """Return the largest size whose confirmation should end within a time; 0 if none does."""
        sizes = range(1, 2 * UNLIMITED_BATCH_SIZE)
        return bisect_right(sizes, seconds, key=partial(self._predict, confirm=True))


def deadline_in(seconds: float | None) -> Deadline | None:
    """Return the deadline of a time limit that starts now; None if there is no limit.

    Raises:
        UsageError: the limit is not a positive number, or too long.
    """
    check_seconds("the time limit", seconds)
    return None if seconds is None else Deadline(seconds)
