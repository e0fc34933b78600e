"""Which size a search tries next.

While nothing has failed, the model's lines are extended, more boldly the clearer they are; then
the bracket is closed around the predicted maximum. Where that was wrong, the search steps away from
it in growing strides, then bisects (as the ITP method, https://en.wikipedia.org/wiki/ITP_method).

Or somebody knows better: a guess that the readings do not refute is confirmed, then a size just
above it, or below if it failed, in growing strides. Where the allocator is fragmented, see
:mod:`~batchfinder.search.fragments`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

from batchfinder.results.result import Probe
from batchfinder.search.bracket import FRAGMENTED_RESOLUTION, Bracket
from batchfinder.search.fragments import FragmentedChooser
from batchfinder.search.pace import PATIENCE, STRIDE, Pace
from batchfinder.search.prediction import predict_maximum

# Batches are made in host memory, whose end is not tested: no size is more than so many times the
# largest that has run, where its memory was seen to rise and where it was not.
MEASURED_GROWTH = 1024
BLIND_GROWTH = 16

# The second size is at most so many times the first: large enough to show a slope, and cheap.
SECOND_GROWTH = 64

# Where a guess failed, the answer is looked for below it in strides of at most this share of it.
MOST_BELOW_GUESS = 1 / 10

# A failure below this share of the predicted maximum shows that the model is no guide.
TRUST = 0.8

# Where verdicts do not repeat, and what ran lies below this share of what failed, there is still
# more to learn from a probe than from a confirmation, which costs three times as much.
FAR_BELOW = 0.5

# What a search may take beyond the probes that bisection needs, with a model and without.
SPARE_PROBES_WITH_MODEL = 8
SPARE_PROBES = 4

MakeGuess: TypeAlias = Callable[[Mapping[int, Probe], float], int | None]
"""``guess(probes, predicted) -> batch size``: where the answer may be, by something else than two
small probes, given by their sizes, and the maximum that they predict; None: unknown."""


class Chooser:
    """Which size to try next.

    Args:
        known: what the search knows so far.
        pace: how it goes about it.
        guess: asked once where the answer may be, when two sizes have run; None: nobody knows.
        is_open: whether no largest size was given.

    Attributes:
        expects_the_answer: whether the size chosen last is where the answer is expected.
        is_guessed: whether the answer is looked for around a guess.
    """

    def __init__(
        self, known: Bracket, pace: Pace, *, guess: MakeGuess | None, is_open: bool
    ) -> None:
        self.known, self.pace, self.guess, self.is_open = known, pace, guess, is_open
        self.fragments = FragmentedChooser(known, pace)
        self.overruns = 0
        self.expects_the_answer = self.is_guessed = False

    def next_size(self) -> int:
        """The size to try next: inside the bracket, or ``low`` where nothing is left inside."""
        known, self.expects_the_answer = self.known, False
        if not known.fits:
            return known.first
        if known.is_tight:
            return known.low
        on_grid = math.floor(min(self._choose(), known.high) / known.unit) * known.unit
        return min(max(on_grid, known.low + known.unit), known.high - known.unit)

    def _choose(self) -> float:
        if self.is_guessed and self.known.is_fragmented:
            # Next to the limit, what a probe has run is no proof; unless the guess was far off it.
            self.is_guessed = self._is_near_the_end()
            self.known.needs_confirmations |= self.is_guessed
        spare = self._probes_to_spare()
        if spare < 0:
            return self._bisect()
        if self.known.failure is None:
            is_last = spare == 0 and self.overruns and not self._is_misled()
            return self._overshoot() if is_last else self._extend()
        if not self.known.is_repeatable:
            return self._step_down()
        if self.is_guessed and not self.known.confirmed and (stride := self._stride_below_guess()):
            self.expects_the_answer = True
            return self.known.high - stride
        return self._bisect() if self.known.misses_in_a_row >= PATIENCE else self._close_in()

    def _probes_to_spare(self) -> float:
        """How many may teach nothing, so that bisection still finishes in time; below 0: none."""
        known = self.known
        if known.failure is None and self.is_open and self.overruns:
            return math.inf  # sizes grow in strides, and what they grow towards is no bound yet
        spare = SPARE_PROBES if self._is_misled() else SPARE_PROBES_WITH_MODEL
        allowed = _halvings(known.first, known.last + known.unit, known.unit) + spare
        width = max(known.unit, math.floor(self.pace.resolution * known.low))
        left = _halvings(known.low, known.high, width)
        return allowed - known.probes - left - 2  # the next one, and the confirmation

    def _is_near_the_end(self) -> bool:
        """Whether something failed, or should do so before long."""
        nearly = self.pace.close_enough * self._predicted_maximum()
        return self.known.failure is not None or self.known.low >= nearly

    def _is_misled(self) -> bool:
        """Whether the model says nothing, or was wrong by more than fragmentation explains."""
        predicted = self._predicted_maximum()
        if self.known.failure is None:  # the bound is one that was asked for, and says nothing
            return math.isinf(predicted)
        return TRUST * predicted > self.known.high

    def _bisect(self) -> float:
        if self.known.failure is None and self.is_open:
            return self.known.low * BLIND_GROWTH
        return self.known.middle

    def _extend(self) -> float:
        """The next size while nothing has failed."""
        known = self.known
        if len(known.fits) == 1:
            # Were all of the first peak due to its samples, this many times as many would fill
            # the budget; some of it never is, so twice that likely fits and is still cheap.
            peak = max(known.fits[known.low].phase_peak_bytes.values(), default=0) or 1
            growth = min(max(2 * known.budget_bytes / peak, 2), SECOND_GROWTH)
            return known.low * growth
        predicted = self._predicted_maximum()
        if self.guess is not None:
            expected, self.guess = self.guess(known.fits, predicted), None
            # What tensors take leaves no room for more than is predicted.
            if expected is not None and expected <= predicted and known.holds(expected):
                self.is_guessed = self.expects_the_answer = True
                self.fragments.aims += 1
                return expected
        if known.low < self.pace.close_enough * predicted:
            growth = BLIND_GROWTH if math.isinf(predicted) else MEASURED_GROWTH
            cautious = self._predicted_maximum(self.pace.reading_noise * known.budget_bytes)
            return min(cautious, self.pace.approach * predicted, known.low * growth)
        self.overruns += 1
        if not known.is_repeatable:
            # Near the limit only a confirmation tells anything.
            known.needs_confirmations = True
            resolution = self.pace.resolution
            stride = resolution * 2.0 ** max(0, self.overruns - PATIENCE)
            size = max(predicted * (1 - resolution / 2), known.low * (1 + stride))
            last = known.low / (1 - resolution)  # its failure ends the search
            return last if last < size < last * (1 + resolution / 2) else size
        if known.is_fragmented:
            return self._choose_in_fragments(predicted)
        if self.overruns == 1:
            return predicted + known.unit
        return max(predicted + known.unit, known.low * (1 + STRIDE * 2.0 ** (self.overruns - 2)))

    def _overshoot(self) -> float:
        """A size that should fail, as bisection up to the largest allowed would cost far more."""
        self.overruns += 1
        return max(self._predicted_maximum(), self.known.low) * (1 + STRIDE)

    def _choose_in_fragments(self, predicted: float) -> float:
        """The next size near the limit, where the allocator is fragmented."""
        size = self.fragments.next_size(predicted)
        self.expects_the_answer = self.fragments.expects_the_answer
        return size

    def _stride_below_guess(self) -> float:
        """How far to go below a guess that failed: twice as far each time; 0: it is of no use."""
        known = self.known
        least = max(known.resolution, math.floor(FRAGMENTED_RESOLUTION * known.high))
        stride = least * 2.0 ** (known.failures_in_a_row - 1)
        return stride if stride <= MOST_BELOW_GUESS * known.high else 0

    def _close_in(self) -> float:
        """The next size between one that fits and one that does not."""
        known = self.known
        predicted = self._predicted_maximum()
        if known.is_fragmented or known.needs_confirmations:
            return self._choose_in_fragments(predicted)
        if predicted < known.high - known.unit:
            # One above the prediction: its failure makes the prediction the last candidate.
            return predicted + known.unit
        if predicted < known.high:
            return known.high - known.unit
        if self._is_misled():
            return self._bisect()
        # The first two failures are those of the predicted maximum and of the size above it.
        stride = STRIDE * 2.0 ** max(0, known.failures_in_a_row - 2)
        return max(self._bisect(), known.high * (1 - stride))

    def _step_down(self) -> float:
        """The next size below a failure that may or may not come again."""
        known, ran = self.known, self.known.largest_that_ran()
        is_off = self._is_misled() or known.failed_like_a_probe
        if is_off and ran is not None and ran.batch_size < FAR_BELOW * known.high:
            known.needs_confirmations = False
            return (ran.batch_size + known.high) / 2
        known.needs_confirmations = True
        # So far that its success ends the search, until failures pile up.
        stride = known.resolution * 2.0 ** max(0, known.failures_in_a_row - PATIENCE - 1)
        above = known.low * (1 + self.pace.resolution)
        size = min(known.high - stride, max(above, self._predicted_maximum()))
        # Hardly above what is confirmed, another confirmation would be in vain.
        is_in_vain = known.low in known.confirmed and size < known.low + known.resolution / 2
        return known.middle if is_in_vain else size

    def _predicted_maximum(self, noise_bytes: float = 0) -> float:
        """Where memory is going to run out; inf if nothing tells."""
        start = self.known.largest_that_ran()
        if start is None:
            return math.inf
        known, apart = self.known, self.pace.apart
        # Slopes come from probes only: a confirmation, from scratch, may read otherwise. Where
        # verdicts do not repeat, every probe is from scratch.
        readings = known.fits if known.is_repeatable else known.fits | known.confirmed
        return predict_maximum(start, readings, known.budget_bytes, apart, noise_bytes)


def _halvings(low: int, high: int, unit: int) -> int:
    """How often a bracket must be halved until nothing lies inside."""
    return math.ceil(math.log2(max(1, (high - low) // unit)))
