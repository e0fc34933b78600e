"""Whether the peaks of a few training steps say that many more will run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev

from batchfinder.results.probe import THRASHING_NOTE
from batchfinder.units import MIB, format_bytes

# A confirmation goes on until the peak has not grown for this many steps in a row.
STEADY_STEPS = 2
MAX_CONFIRM_STEPS = 10

# Where batches vary in length, a confirmation trains on this many: the longest first and last.
VARIED_STEPS = 8

# On a caching allocator this share of the budget stays free then, since other orders of the same
# batches need more. Of 20 orders of BERT's all ran 8 steps at 126, 3 died within 30 steps there,
# and none did at 124.
VARIED_ROOM = 0.025

# What flushes the allocator's cache in this many steps in a row is taken to do so in all. Fewer may
# have found a layout that later steps keep, or be on the way to run out of memory.
MAX_FLUSHING_STEPS = 3

# Growth below this share of the budget is the noise of the readings.
GROWTH_NOISE = 1 / 1000

# What each step leaves in use beyond this is a leak; below it are tables and counters.
LEAK_BYTES = MIB

# How many steps it takes to see how much peaks differ, where they do, and how many at most. The
# peaks of a ViT rose in the seventeenth step to a tenth above those of the first ten. The more are
# watched the fewer sizes pass that die later (scripts/bench_confirmation.py).
STEPS_FOR_SPREAD = 6
MAX_STEPS_FOR_SPREAD = 14

# Where peaks differ from step to step, this many standard deviations above their mean must fit into
# the budget, and this many into the budget and the headroom: few steps tell how much they differ,
# and the longer one trains the higher the highest.
DEVIATIONS = 3
DEVIATIONS_WITH_HEADROOM = 4.5

# Stop early where this many fit into the budget alone: beyond them lies one reading
# of 400 at most, however they are distributed (Chebyshev's inequality); that the first ones
# hardly differed is weak evidence. With 8 a ViT and a GPT passed after seven calm steps at sizes
# that needed more than all memory later.
DEVIATIONS_TO_END_EARLY = 20

# That they differ too much is believed after fewer steps where even this share of the deviations
# does not fit: the spread of three readings is half as large again as the true one in one case of
# ten.
STEPS_FOR_EXCESS = 4
SURE_EXCESS = 2 / 3

# Among peaks that wander some step sets a new mark every so often; this many in a row are a trend.
MARKS_OF_A_TREND = 3

# A peak below this share of the highest was read too low: memory that was asked for and not written
# to is seen only where a step sets a new mark.
READ_TOO_LOW = 0.85


class PeakWatch:
    """Watches the peaks of a confirmation: whether it may end, and what speaks against the size.

    Args:
        budget_bytes: what a step may use.
        least_steps: to watch at least.
        peaks_wander: whether the same step needs a little more or less each time.
        headroom_bytes: what lies free beyond the budget.
        batches_vary: whether the steps train on batches of different shapes.

    Attributes:
        is_settled: whether enough steps were watched, and the last ones held no more than those
            before without flushing the allocator's cache, or where peaks wander, show no trend and
            stay clear of the budget;
            once it is so it stays so.
        is_over: whether it may end, for better or worse; as that.
        most_steps: after which it will not settle any more.
        allowed_bytes: what the steps may use.

    Example:
        >>> watch = PeakWatch(budget_bytes=1000, least_steps=3, peaks_wander=False)
        >>> for peak in (800, 900, 900):
        ...     watch.note(peak)
        >>> watch.is_settled
        False
        >>> watch.note(900)
        >>> watch.is_settled, watch.objection()
        (True, '')
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        least_steps: int,
        peaks_wander: bool,
        headroom_bytes: float = 0,
        batches_vary: bool = False,
    ) -> None:
        self._budget_bytes, self._headroom_bytes = budget_bytes, headroom_bytes
        self._peaks_wander = peaks_wander
        least_steps = max(least_steps, VARIED_STEPS * batches_vary)
        keeps_room = batches_vary and not peaks_wander
        self.allowed_bytes = int(budget_bytes * (1 - VARIED_ROOM * keeps_room))
        self._least_steps = max(least_steps, STEPS_FOR_SPREAD) if peaks_wander else least_steps
        most_steps = MAX_STEPS_FOR_SPREAD if peaks_wander else MAX_CONFIRM_STEPS
        self.most_steps = max(most_steps, self._least_steps + STEADY_STEPS)
        self._noise_bytes = GROWTH_NOISE * budget_bytes
        self._peaks: list[int] = []
        self._flushing = self._quiet = 0
        self.is_settled = self.is_over = False

    @property
    def batch_number(self) -> int:
        """The number of the batch for the next step; 0, the longest, comes once in each round."""
        return len(self._peaks) % (VARIED_STEPS - 1)

    def note(self, peak_bytes: int, flushes: int = 0) -> None:
        """Take note of what one more step needed, and of how often it flushed the cache."""
        self._peaks.append(peak_bytes)
        self._flushing, self._quiet = (self._flushing + 1, 0) if flushes else (0, self._quiet + 1)
        if len(self._peaks) >= STEPS_FOR_EXCESS:
            self.is_over |= self._excess_bytes(SURE_EXCESS) > 0
        if len(self._peaks) < self._least_steps:
            return
        if self._peaks_wander:
            is_clear = highest_to_expect(self._peaks, DEVIATIONS_TO_END_EARLY) <= self._budget_bytes
            self.is_settled |= is_clear and not is_rising(self._peaks, self._noise_bytes)
        else:
            steady = min(self._quiet, steps_without_growth(self._peaks, self._noise_bytes))
            self.is_settled |= steady >= STEADY_STEPS
        self.is_over |= self.is_settled or self._flushing >= MAX_FLUSHING_STEPS

    def objection(self) -> str:
        """Why the size is not fit for training; "" if it is."""
        if self._flushing:
            return THRASHING_NOTE
        if (excess := self._excess_bytes()) > 0:
            return (
                "its peak differs from step to step, and would pass the budget by "
                f"{format_bytes(excess)} in some"
            )
        if not self.is_settled and (
            not self._peaks_wander or is_rising(self._peaks, self._noise_bytes)
        ):
            return f"memory still grew after {len(self._peaks)} steps"
        return ""

    def _excess_bytes(self, share: float = 1) -> float:
        """By how much some step must be expected to pass what it may; 0: peaks do not wander."""
        if not self._peaks_wander:
            return 0
        usual = highest_to_expect(self._peaks, share * DEVIATIONS)
        rare = highest_to_expect(self._peaks, share * DEVIATIONS_WITH_HEADROOM)
        return max(usual, rare - self._headroom_bytes) - self._budget_bytes


def left_behind(in_use_bytes: Sequence[int]) -> int:
    """What every step leaves in use, the first one aside, which makes the optimizer's states.

    Args:
        in_use_bytes: at the end of each step.

    Returns:
        The bytes of the step that left least; 0 for next to nothing, or too few steps to tell.

    Example:
        >>> left_behind([100 * MIB, 130 * MIB, 158 * MIB]) // MIB
        28
        >>> left_behind([100 * MIB, 130 * MIB, 130 * MIB])
        0
    """
    left = min((after - before for before, after in pairwise(in_use_bytes)), default=0)
    return left if len(in_use_bytes) > 2 and left >= LEAK_BYTES else 0


def steps_without_growth(peaks: Sequence[int], noise_bytes: float) -> int:
    """How many of the last steps needed no more than the most that was needed before.

    Args:
        peaks: the peak of each step, in bytes.
        noise_bytes: a mark is passed only by more than this.

    Returns:
        The number of steps; the first one always grows.

    Example:
        >>> steps_without_growth([90, 100, 95, 99], noise_bytes=0)
        2
    """
    highest = steady = 0
    for peak in peaks:
        steady = steady + 1 if highest and peak <= highest + noise_bytes else 0
        highest = max(highest, peak)
    return steady


def is_rising(peaks: Sequence[int], noise_bytes: float) -> bool:
    """Whether each of the last few steps needed more than all before it.

    Args:
        peaks: the peak of each step, in bytes.
        noise_bytes: as for :func:`steps_without_growth`.

    Example:
        >>> is_rising([100, 96, 101, 103, 106], noise_bytes=0)
        True
        >>> is_rising([100, 96, 101, 99, 106], noise_bytes=0)
        False
    """
    ends = range(len(peaks) - MARKS_OF_A_TREND + 1, len(peaks) + 1)
    return ends.start > 1 and not any(
        steps_without_growth(peaks[:end], noise_bytes) for end in ends
    )


def highest_to_expect(peaks: Sequence[int], deviations: float) -> float:
    """What a step must be expected to need sooner or later, by the few that ran.

    The first step is left out, since memory that it frees lies in the way of later ones; so are
    peaks that were read too low.

    Args:
        peaks: the peak of each step, in bytes; at least one.
        deviations: the number of standard deviations above the mean.

    Returns:
        The bytes, at least the most that was needed.

    Example:
        >>> highest_to_expect([80, 98, 60, 100, 102], deviations=3)
        106.0
    """
    later = [peak for peak in peaks[1:] if peak >= READ_TOO_LOW * max(peaks)]
    if len(later) < 2:
        return max(peaks)
    return max(*peaks, fmean(later) + deviations * stdev(later))
