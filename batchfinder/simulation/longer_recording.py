"""Guess the largest size whose batches vary in length, by replaying confirmations. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from batchfinder.probing.devices.allocator.caching import AllocatorSettings, DeviceFullError
from batchfinder.probing.devices.allocator.expandable import allocator_of
from batchfinder.probing.devices.allocator.recorded import Replay
from batchfinder.probing.devices.allocator.recorded_step import (
    common_requests,
    only_large,
    steps_vary,
)
from batchfinder.results.probe import Outcome, Probe
from batchfinder.search.bracket import FAR_FROM_BUDGET, differing_at
from batchfinder.search.head_start import Guess
from batchfinder.search.prober import Recording
from batchfinder.simulation.lasting import (
    ORDERED_STEPS,
    bytes_to_last,
    going_on,
    in_other_orders,
    limit_of,
    may_begin_anywhere,
)
from batchfinder.simulation.scaled_recording import ScaledRecording

# Steps of each order near the budget, if one of the shorter orders needs more than the recorded
# one. With 30, 150 of set-up lightning-24 lasted in all six orders, and ran out of memory in one
# training of four, in its 20th step; with 120, four of the six need more.
MANY_STEPS = 120

# A guess replays this many sizes besides a recorded one. It is this near the answer, as a share. In
# searches of seven set-ups of scripts/benchmarks/parts/setup_list.py whose lengths vary, guesses
# from a quarter of the answer and more were 4 % below it to 10 % above.
REPLAYED_GUESSES, DEVIATION = 2, 0.04


class Needs(NamedTuple):
    """The bytes that a confirmation needs in order to last.

    Attributes:
        most: the bytes of the variant (:func:`going_on`) that needs most.
        small: the part of it in the allocator's small pool, where the order of steps hardly counts.
        worst: the number of that variant.
        steps: the steps of the variants in other orders.
    """

    most: int
    small: int
    worst: int
    steps: int


class LongerRecordings:
    """Confirmations of batches that vary in length, as if each had gone on for many steps.

    Args:
        recordings: confirmations, by size. There may be more later.
        budget_bytes: the bytes that the allocator may reserve.
        settings: settings of the allocator.
        room_bytes: more bytes, kept free because other orders need more than the recorded one.
            Orders that begin with a shorter batch are such orders, so they may use this room.
    """

    def __init__(
        self,
        recordings: Mapping[int, Recording],
        budget_bytes: int,
        settings: AllocatorSettings,
        room_bytes: int = 0,
    ) -> None:
        self._recordings, self._settings = recordings, settings
        self._budget_bytes, self._room_bytes = budget_bytes, room_bytes
        self._needs = cache(self._needs_of)
        self.guess_from = cache(self._guessed_from)

    def last(self, size: int) -> bool:
        """Return True if the confirmation at a size lasts, as :func:`lasts` does."""
        recording = self._recordings.get(size)
        if not (recording and recording.steps):
            return True
        share = self._needs(size).most / self._limit(size)
        is_far = share < FAR_FROM_BUDGET and not recording.validations
        return share <= 1 and (is_far or self._begins(size, recording))

    def foresee(self, size: int) -> bool:
        """Return True if the confirmation just below a size, scaled to it, does not last."""
        below = just_below(self._recordings, size)
        if not below:
            return False
        guess = self.guess_from(below)
        return guess is not None and guess.size < size

    def guess(self, failure: Probe | None = None) -> Guess | None:
        """Guess the largest size that lasts, by the largest recordings: the smallest that one says.

        What lengths the steps of a recording have is chance. Those before a step that ran out of
        memory count too. A guess that a larger size has beaten does not. There is no guess if the
        size that failed ran out of memory in its first step, and not by these recordings: then
        requests do not grow in proportion, as masks of joined texts.
        """
        ran_out = failure is not None and failure.outcome is Outcome.OOM
        if failure and ran_out and self._refuted_by(failure.batch_size):
            return None
        low = whole_below(self._recordings, failure.batch_size if failure else math.inf)
        sizes = [size for size, each in self._recordings.items() if len(each.steps) > 2]
        large = ((n, self.guess_from(n)) for n in sizes if 2 * n >= max(sizes))
        unbeaten = (guess for n, guess in large if guess and (n >= low or guess.size > low))
        return min(unbeaten, key=lambda guess: guess.size, default=None)

    def _refuted_by(self, failed: int) -> bool:
        """Return True if the longest batch of a size that ran out of memory should have fitted."""
        size, recording = whole_below(self._recordings, failed), self._recordings.get(failed)
        if not (size and recording and recording.ran_out and not recording.steps):
            return False
        scaled_up = in_proportion(self._recordings, size).at(failed)
        allocator = allocator_of(self._budget_bytes + self._room_bytes, self._settings)
        try:
            next(Replay(scaled_up, allocator).steps(1))
        except DeviceFullError:
            return False
        return True

    def _limit(self, size: int) -> int:
        return limit_of(self._recordings[size], self._budget_bytes)

    def _needs_of(self, size: int) -> Needs:
        recording = self._recordings[size]
        large = only_large(recording)
        steps = ORDERED_STEPS
        each = [bytes_to_last(variant, self._settings) for variant in going_on(large, steps)]
        small = bytes_to_last(recording, self._settings) - each[0]
        if max(each) > max(each[:2]) and max(each) > FAR_FROM_BUDGET * self._limit(size):
            steps = MANY_STEPS
            orders = in_other_orders(large, steps)
            each[2:] = [bytes_to_last(variant, self._settings) for variant in orders]
        return Needs(small + max(each), small, each.index(max(each)), steps)

    def _guessed_from(self, size: int) -> Guess | None:
        needs, held = self._needs(size), sum(self._recordings[size].held)
        limit_bytes, scaled = self._limit(size), in_proportion(self._recordings, size)

        def needed(larger: int) -> int:
            # The variant that needs most at one size needs most at another. Small requests that
            # are large here may leave nothing to exchange.
            large = only_large(scaled.at(larger))
            variant = next(going_on(large, needs.steps, only=needs.worst), large)
            return needs.small + bytes_to_last(variant, self._settings)

        end = scaled.end_of_tensors(limit_bytes)
        if math.isinf(end) or needs.most <= held:
            return None  # nothing grows
        known = {0: held, size: needs.most}
        guess = max(1, math.floor(end))
        for _ in range(REPLAYED_GUESSES):
            known[guess] = known.get(guess) or needed(guess)
            low = max((n for n, most in known.items() if most <= limit_bytes), default=0)
            high = min((n for n, most in known.items() if n > low), default=low)
            share = (limit_bytes - known[low]) / max(1, known[high] - known[low])
            guess = max(1, low + math.floor(share * (high - low)))
        while guess > 1 and not self._begins(size, scaled.at(guess)):
            guess = math.floor(guess * (1 - DEVIATION))
        return Guess(guess, deviation=DEVIATION)

    def _begins(self, size: int, recording: Recording) -> bool:
        """Return True if a recording, scaled from that of a size, may begin with any batch."""
        limit_bytes = self._limit(size) + self._room_bytes - self._needs(size).small
        return may_begin_anywhere(only_large(recording), limit_bytes, self._settings)


def in_proportion(recordings: Mapping[int, Recording], size: int) -> ScaledRecording:
    """Scale a confirmation of batches that differ in length, as two sizes have no length in common.

    Requests grow in proportion, but for those that all steps of this and the next smaller size
    make, and those that all validations make: their batches often stay as large.
    """
    known = whole(recordings)
    sizes = sorted(each for each in known if each <= size)
    fixed = common_requests(step for each in sizes[-2:] for step in known[each].steps)
    always = common_requests(step for each in sizes for step in known[each].validations)
    return ScaledRecording.in_proportion(size, recordings[size], fixed, always)


def whole(recordings: Mapping[int, Recording]) -> dict[int, Recording]:
    """Return the recordings, by size, of confirmations that did not run out of memory."""
    return {size: each for size, each in recordings.items() if each.steps and not each.ran_out}


def whole_below(recordings: Mapping[int, Recording], size: float) -> int:
    """Return the largest size of these below another one; 0 if there is none."""
    return max((each for each in whole(recordings) if each < size), default=0)


def just_below(recordings: Mapping[int, Recording], size: int) -> int:
    """Return the size of the confirmation that shows how one of a larger size ends; 0 if none does.

    It is no farther below than the final bracket is wide, and its steps differ: then replays decide
    what fits, so the larger size need not run.
    """
    near = whole_below(recordings, size)
    is_near = near and size - near <= differing_at(size)
    return near if is_near and steps_vary(recordings[near]) else 0
