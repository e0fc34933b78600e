"""Judge by the peaks of a few training steps whether many more steps will run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist, fmean, stdev

from batchfinder.results.probe import SHORT_LIVED_NOTE, THRASHING_NOTE
from batchfinder.search.plan import VARIED_ROOM
from batchfinder.units import MIB, format_bytes

# A confirmation runs until the peak has not grown for STEADY_STEPS steps in a row, and runs at most
# MAX_CONFIRM_STEPS steps.
STEADY_STEPS = 2
MAX_CONFIRM_STEPS = 10

# Least number of steps to confirm if batches vary in length, if peaks wander and on a caching
# allocator. The longest batch is first and last. On a caching allocator, all confirmations that
# failed in trainer-bert-24 and sft-24 did so in one of the first 3 steps (setups.json).
VARIED_STEPS = 8
CACHING_VARIED_STEPS = 5

# Least number of steps of later confirmations once one showed that the model makes other requests
# in each step, because it skips layers at random, for example. No step is known to be the largest,
# and few steps leave few kinds to replay in other orders. With 5, set-up wav2vec2-80 was answered
# 288, which ran out of memory in step 4 with one of three seeds; with 10, 270, which did with none.
DIFFERING_STEPS = MAX_CONFIRM_STEPS

# The optimizer's states appear at the end of the first step. Blocks cached before are then in the
# way, and the second step may flush them. A size that flushes later trains in a lucky layout only.
# With a MobileNet, 523 ran quietly after a flush in the third step, and another loop of the same
# steps ran out of memory in its fifth (mobilenet-24 of scripts/benchmarks/parts/setup_list.py).
# STEADY_STEPS quiet steps must follow: at batch size 132 timm's train.py flushed in two steps, was
# quiet in the third, and flushed three times in the fourth (scripts/benchmarks/bench_scripts.py).
STEPS_THAT_MAY_FLUSH = 2

# A launch of ``run`` trains in the script's own loop. Equal batches keep the layout in which
# STEADY_STEPS of its steps were quiet. In 4 GiB, timm's train.py at 133 to 141 and PyTorch's
# imagenet at 140 to 151 flushed in no step from the 8th to the 50th; timm's at 142 to 146 in all.
SETTLING_STEPS = MAX_CONFIRM_STEPS - STEADY_STEPS

# Growth below this fraction of the budget is noise of the readings.
GROWTH_NOISE = 1 / 1000

# If each step leaves at least this much more in use, it leaks. Tables and counters need less.
LEAK_BYTES = MIB

# Where peaks differ from step to step, a size passes once it is CONFIDENCE sure that this share of
# all steps stays within the budget, and that share within the budget plus the headroom. It is
# refused once the last step would not make it sure either, if the peaks keep their spread. Under
# 60 limits each, 22 trainings pass 659 times, after 6.4 steps on average, and none of these runs
# out of memory. Others are refused after 3.1 (scripts/benchmarks/bench_confirmation.py).
WITHIN_BUDGET, WITHIN_MEMORY, CONFIDENCE = 0.99, 0.9999, 0.95

# Steps after which such a size is refused at the earliest, passes at the earliest, and is refused
# if it has not passed. The same trainings pass 634 times within 10 steps, and 668 times within 20.
STEPS_FOR_SPREAD, WANDERING_STEPS, MAX_WANDERING_STEPS = 5, 6, 14

# Peaks that differ from step to step set a new maximum now and then. Three in a row are a trend.
MARKS_OF_A_TREND = 3

# A peak below this fraction of the highest was read too low. Memory that was requested but never
# written to is seen only if a step sets a new high-water mark.
READ_TOO_LOW = 0.85


def with_room(budget_bytes: int) -> int:
    """Return the bytes that steps may use if batches vary in length."""
    return int(budget_bytes * (1 - VARIED_ROOM))


class PeakWatch:
    """Watches the peaks of a confirmation: decides when it may end and whether the size passes.

    Args:
        budget_bytes: memory that a step may use.
        least_steps: least number of steps to watch.
        peaks_wander: True if the same step needs a little more or less memory each time.
        headroom_bytes: free memory beyond the budget.
        batches_vary: True if the steps train on batches of different shapes.
        may_flush: how many steps may flush the allocator's cache, if all batches are of one shape.

    Attributes:
        peaks: the peak of each step so far, in bytes.
        is_settled: True once enough steps were watched and the last ones neither needed more memory
            nor flushed the allocator's cache. If peaks wander, they must show no trend and stay
            well below the budget. It never becomes False again.
        most_steps: the number of steps after which the confirmation ends in any case.

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
        may_flush: int = STEPS_THAT_MAY_FLUSH,
    ) -> None:
        self._budget_bytes, self._headroom_bytes = budget_bytes, headroom_bytes
        self._peaks_wander = peaks_wander
        self._varied_steps = VARIED_STEPS if peaks_wander else CACHING_VARIED_STEPS
        self._least_steps = max(least_steps, WANDERING_STEPS) if peaks_wander else least_steps
        most_steps = MAX_WANDERING_STEPS if peaks_wander else MAX_CONFIRM_STEPS
        self.most_steps = max(most_steps, self._least_steps + STEADY_STEPS)
        self._may_flush = may_flush
        self._batches_vary = self._lengths_differ = False
        if batches_vary:
            self.expect_variation(lengths_differ=True)
        self._noise_bytes = GROWTH_NOISE * budget_bytes
        self.peaks: list[int] = []
        self._last_flush = 0
        self.is_settled = self._exceeds = self._runs_out = False

    @property
    def batch_number(self) -> int:
        """The number of the next step's batch. Batch 0, the longest, comes once in each round."""
        step, place = len(self.peaks), len(self.peaks) % (self._varied_steps - 1)
        return step if self._peaks_wander and place else place  # each new shape breaks up the heap

    @property
    def may_end(self) -> bool:
        """True once the least number of steps has run."""
        return len(self.peaks) >= self._least_steps

    @property
    def may_end_next(self) -> bool:
        """True once the next step may be the last."""
        return len(self.peaks) >= max(2, self._least_steps - 1)

    def expect_variation(self, *, lengths_differ: bool = False) -> None:
        """Watch more steps, as batches differ in shape. With longer ones, more steps may flush."""
        self._batches_vary = True
        self._lengths_differ |= lengths_differ
        self._may_flush = SETTLING_STEPS if self._lengths_differ else STEPS_THAT_MAY_FLUSH
        self._least_steps = max(self._least_steps, self._varied_steps)
        self.most_steps = max(self.most_steps, self._least_steps + STEADY_STEPS)

    def note(self, peak_bytes: int, flushes: int = 0) -> None:
        """Record the peak of one more step, and how often it flushed the cache."""
        self.peaks.append(peak_bytes)
        if flushes:
            self._last_flush = len(self.peaks)
        if self._batches_vary or len(self.peaks) >= STEPS_FOR_SPREAD:
            self._exceeds |= self._excess_bytes(self.most_steps) > 0
        if not self.may_end:
            return
        if self._peaks_wander:
            is_clear = self._excess_bytes() <= 0
            self.is_settled |= is_clear and not is_rising(self.peaks, self._noise_bytes)
        else:
            steady = steps_without_growth(self.peaks, self._noise_bytes)
            quiet = len(self.peaks) - self._last_flush
            self.is_settled |= min(steady, quiet) >= STEADY_STEPS

    def run_out(self) -> None:
        """Record that the next step would run out of memory."""
        self._runs_out = True

    @property
    def is_over(self) -> bool:
        """True once the confirmation may end, passed or not."""
        return self.is_settled or self._exceeds or self.is_refused

    @property
    def is_refused(self) -> bool:
        """True once a step ran out of memory, or flushed the cache too late."""
        return self._runs_out or self._flushes

    @property
    def _flushes(self) -> bool:
        return self._last_flush > self._may_flush

    def objection(self) -> str:
        """Return the reason why the size is not fit for training; "" if it is fit."""
        if self._flushes:
            return THRASHING_NOTE
        if self._runs_out:
            return SHORT_LIVED_NOTE
        if (excess := self._excess_bytes()) > 0:
            return (
                "its peak memory differs from step to step, and would pass the budget by "
                f"{format_bytes(excess)} in some steps"
            )
        if not self.is_settled and (
            not self._peaks_wander or is_rising(self.peaks, self._noise_bytes)
        ):
            return f"memory still grew after {len(self.peaks)} steps"
        return ""

    def _excess_bytes(self, steps: int | None = None) -> float:
        """Return by how many bytes some step may exceed its limit; 0 or less if none will.

        With ``steps``, as if that number of them had shown the same spread.
        """
        if not self._peaks_wander:
            return 0
        if self._batches_vary:  # peaks differ because batches do, so their spread says nothing
            return max(self.peaks) - with_room(self._budget_bytes)
        usual = highest_to_expect(self.peaks, WITHIN_BUDGET, steps)
        rare = highest_to_expect(self.peaks, WITHIN_MEMORY, steps)
        return max(usual, rare - self._headroom_bytes) - self._budget_bytes


def left_behind(in_use_bytes: Sequence[int]) -> int:
    """Return the bytes that every step leaves in use: those of the step that left the least.

    The first step is left out, because it creates the optimizer's states. The answer is 0 below
    ``LEAK_BYTES``, or with fewer than three steps.

    Example:
        >>> left_behind([100 * MIB, 130 * MIB, 158 * MIB]) // MIB
        28
        >>> left_behind([100 * MIB, 130 * MIB, 130 * MIB])
        0
    """
    left = min((after - before for before, after in pairwise(in_use_bytes)), default=0)
    return left if len(in_use_bytes) > 2 and left >= LEAK_BYTES else 0


def steps_without_growth(peaks: Sequence[int], noise_bytes: float) -> int:
    """Count the last steps that needed no more memory than the maximum before them.

    A peak sets a new maximum if it exceeds the old one by more than the noise. The first step
    always counts as growth.

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
    """Return True if each of the last few steps needed more memory than all steps before it.

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


def highest_to_expect(peaks: Sequence[int], share: float, steps: int | None = None) -> float:
    """Return the peak, in bytes, that this share of all steps will hardly exceed.

    It is never below the highest peak so far. The first step is left out of the statistics, because
    memory that it frees is in the way of later steps. Peaks that were read too low count only as
    steps that needed no more.

    With ``steps``, the peaks count as if that number of them had shown the same spread.

    Example:
        >>> round(highest_to_expect([80, 98, 60, 100, 102, 100], 0.99))
        109
    """
    later = [peak for peak in peaks[1:] if peak >= READ_TOO_LOW * max(peaks)]
    if len(set(later)) < 2:
        return max(peaks)
    factor = tolerance_factor((steps or len(peaks)) - 1, share)
    return max(*peaks, fmean(later) + factor * stdev(later))


def tolerance_factor(readings: int, share: float) -> float:
    """Return how many standard deviations above the mean this share of a normal distribution ends.

    Mean and deviation are those of the readings, and ``CONFIDENCE`` is the probability that the end
    is not higher (https://www.itl.nist.gov/div898/handbook/prc/section2/prc263.htm).

    Example:
        >>> [round(tolerance_factor(readings, 0.99), 1) for readings in (4, 9, 1000)]
        [7.3, 4.1, 2.4]
    """
    z_share, z_confidence = NormalDist().inv_cdf(share), NormalDist().inv_cdf(CONFIDENCE)
    a = 1 - z_confidence**2 / (2 * (readings - 1))
    b = z_share**2 - z_confidence**2 / readings
    return math.inf if a <= 0 else (z_share + math.sqrt(z_share**2 - a * b)) / a
