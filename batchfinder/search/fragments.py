"""Which size a search tries next where the allocator is fragmented.

The answer is expected where the line of what the allocator holds, instead of what its tensors take,
meets the budget: up to there it is easy to serve the step. Beyond that it is chance which sizes it
has room for; a size just above says at once whether that is worth a look.
"""

from __future__ import annotations

import math

from batchfinder.search.bracket import FRAGMENTED_RESOLUTION, Bracket
from batchfinder.search.pace import PATIENCE, STRIDE, Pace
from batchfinder.search.prediction import predict_easy_maximum

# What a fragmented allocator holds grows by whole segments: so far below the end of its line, as a
# share of the size, it is sure to serve the step.
EASY_MARGIN = 1 / 200

# Where several steps from scratch need more than a probe has shown, that can be a fifth of it.
RETREAT = 0.75


class FragmentedChooser:
    """Which size to try next, where tensors alone do not tell, or a confirmation refuted a probe.

    Args:
        known: what the search knows so far.
        pace: how it goes about it.

    Attributes:
        expects_the_answer: whether the size chosen last is where the answer is expected.
        aims: how often the search made for where the answer is expected, at a guess too.
    """

    def __init__(self, known: Bracket, pace: Pace) -> None:
        self.known, self.pace = known, pace
        self.aims = 0
        self.expects_the_answer = False
        self._above_easy = 0.0  # just above where it is easy, once that was known
        self._has_looked_above = False  # above what is easy, or what was confirmed first
        self._strides = self._climbs = 0

    def next_size(self, predicted: float) -> float:
        """The size to try next, not rounded.

        Args:
            predicted: where what tensors take is going to meet the budget.
        """
        self.expects_the_answer = False
        known, easy = self.known, self._easy_maximum(predicted)
        if known.needs_confirmations:
            return self._next_confirmation(easy)
        is_near = known.low >= self.pace.close_enough * min(easy, known.high)
        if is_near and not self.aims and known.holds(easy):
            next_up = (easy // known.unit + 1) * known.unit
            self._above_easy = max(easy * (1 + FRAGMENTED_RESOLUTION), next_up)
            self._has_looked_above = True
            if not known.holds(self._above_easy):
                return self._aim_at(easy)
            # Its failure makes what is easy the last candidate, its success spares a confirmation.
            self.aims += 1
            return self._above_easy
        if known.failures_in_a_row:
            return self._below_failure() if is_near else known.middle
        if known.low in known.confirmed and not self._has_looked_above:
            self._has_looked_above = True  # most often nothing larger fits
            return self._just_above
        if known.failure is not None:
            return known.middle
        if self._just_above >= predicted:
            return self._stride_up()
        self._climbs += 1
        # Probes may be wrong, and the further up the more of them would be in vain.
        self.expects_the_answer = self._climbs > 1 and not known.confirmed
        return (self._just_above + predicted) / 2

    def _below_failure(self) -> float:
        """The next size below something that failed near the limit."""
        known, failures = self.known, self.known.failures_in_a_row
        was_above_easy = known.high <= self._above_easy < known.high + known.unit
        if failures == 1 and (known.failure_is_thrashing or was_above_easy):
            # If it was one of the first, or by chance, what is just below is the answer.
            return known.high - known.resolution
        # What failed where it should have been easy is not far off.
        was_easy = known.high < self._above_easy and not known.confirmed
        stride = STRIDE * 2.0 ** (failures - (3 if was_easy else 1))
        return max(known.middle, known.high * (1 - stride))

    def _next_confirmation(self, easy: float) -> float:
        """The next size where a confirmation failed that a probe had led to expect.

        The optimizer's states came to lie among the activations of the first step, and cost the
        room that the next one needs. How much, only confirmations tell: by what the allocator held.
        """
        known = self.known
        if known.failure is None:
            follows = easy > self._just_above and self.aims <= PATIENCE  # as each moves the line
            return self._aim_at(easy) if follows and known.holds(easy) else self._stride_up()
        ran = max((size for size in known.fits if known.low < size < known.high), default=0)
        # That a probe was just refuted, or what lies above the confirmed, may have been chance.
        is_first = not known.probes or (known.failures_in_a_row == 1 and known.confirmed)
        if is_first and known.high - ran <= 2 * known.resolution:
            return ran
        if known.low not in known.confirmed:
            return self._retreat()
        if known.misses_in_a_row >= PATIENCE - 1:
            return known.middle
        if easy < known.high - known.resolution:
            if easy <= self._just_above and self._has_looked_above:
                return known.middle
            self._has_looked_above |= easy <= self._just_above
            return max(easy, self._just_above)
        if not known.is_fragmented and not known.failures_in_a_row:
            return known.high - known.resolution  # its success ends the search
        return max(known.middle, known.high * (1 - STRIDE * 2.0**known.failures_in_a_row))

    def _retreat(self) -> float:
        """So far below a failure that something should be confirmed at last."""
        known, stride_below = self.known, self.known.high * (1 - STRIDE)
        if not known.is_fragmented:
            return stride_below
        easy = self._above_easy * (1 - FRAGMENTED_RESOLUTION)
        return easy if known.low < easy < stride_below else known.high * RETREAT

    def _aim_at(self, expected: float) -> float:
        self.expects_the_answer = True
        self.aims += 1
        return expected

    @property
    def _just_above(self) -> float:
        """As far above what runs as counts here."""
        return self.known.low * (1 + FRAGMENTED_RESOLUTION)

    def _stride_up(self) -> float:
        """A size above all that ran, in growing strides, where nothing tells what fails."""
        self._strides += 1
        return self.known.low * (1 + FRAGMENTED_RESOLUTION * 2.0 ** (self._strides - 1))

    def _easy_maximum(self, predicted: float) -> float:
        """Up to where the allocator serves the step without any trouble."""
        start = self.known.largest_that_ran()
        if start is None:
            return math.inf
        readings = self.known.fits
        if self.known.needs_confirmations:  # and the smallest, since probes had more room
            readings = {min(readings): readings[min(readings)]} | self.known.confirmed
        easy = predict_easy_maximum(start, readings, self.known.budget_bytes, self.pace.apart)
        return min(easy, predicted) * (1 - EASY_MARGIN)
