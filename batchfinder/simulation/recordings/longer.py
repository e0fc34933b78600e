"""Guess the largest size whose batches vary in length, by replaying confirmations. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial

from batchfinder.probing.devices.allocator.caching import AllocatorSettings, DeviceFullError
from batchfinder.probing.devices.allocator.expandable import allocator_of
from batchfinder.probing.devices.allocator.recorded import Replay
from batchfinder.probing.devices.allocator.recorded_step import (
    common_requests,
    only_large,
    steps_vary,
)
from batchfinder.results.probe import Outcome, Probe
from batchfinder.search.bracket import differing_at
from batchfinder.search.head_start import Guess
from batchfinder.search.prober import Recording
from batchfinder.simulation.recordings.lasting import bytes_to_last, failing_variant, variants_of
from batchfinder.simulation.recordings.scaled import ScaledRecording

# Guesses are this near the answer, as a share: in searches of seven set-ups of
# scripts/benchmarks/parts/setup_list.py whose lengths vary, guesses from a quarter of the answer
# and more were 4 % below it to 10 % above. Sizes this far apart are tried.
DEVIATION, APART = 0.04, 0.01

# Fraction of the budget kept free in replays, because a training has more orders: of 24 at 141 of
# lightning-24, none ran out of memory in 30 steps with 2.5 % free; with all of the budget, one did
# in 400 steps.
ORDERS_ROOM = 0.025


class LongerRecordings:
    """Confirmations of batches that vary in length, as if each had gone on for many steps.

    Args:
        recordings: confirmations, by size. There may be more later.
        budget_bytes: the bytes that the allocator may reserve.
        settings: settings of the allocator.
    """

    def __init__(
        self,
        recordings: Mapping[int, Recording],
        budget_bytes: int,
        settings: AllocatorSettings,
    ) -> None:
        self._recordings, self._settings = recordings, settings
        self._budget_bytes = budget_bytes
        self._limit = cache(self._limit_of)
        self._scaled = cache(partial(in_proportion, recordings))
        self._reached: dict[int, tuple[int, range]] = {}

    def last(self, size: int) -> bool:
        """Return True if the confirmation at a size lasts, as :func:`lasts` does."""
        recording = self._recordings.get(size)
        return recording is None or self._failing(size, recording) is None

    def foresee(self, size: int) -> bool:
        """Return True if the confirmation just below a size, scaled to it, does not last."""
        below = just_below(self._recordings, size)
        return below > 0 and self._reach(below, size) < size

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
        large = [n for n in sizes if 2 * n >= max(sizes)]
        # A guess nearer to the largest that lasted than the final bracket is wide changes nothing.
        reached = [self._reach(n, low + differing_at(low)) for n in large if n >= low]
        reached += [guess for n in large if n < low and (guess := self._reach(n, low + 1)) > low]
        return _guess(min(reached, default=math.inf))

    def _refuted_by(self, failed: int) -> bool:
        """Return True if the longest batch of a size that ran out of memory should have fitted."""
        size = whole_below(self._recordings, failed)
        if not size or ended_a_step(self._recordings, failed):
            return False
        scaled_up = self._scaled(size).at(failed)
        allocator = allocator_of(self._budget_bytes, self._settings)
        try:
            next(Replay(scaled_up, allocator).steps(1))
        except DeviceFullError:
            return False
        return True

    def _limit_of(self, size: int) -> int:
        """Return the bytes that large requests may use: the small pool hardly depends on orders."""
        recording = self._recordings[size]
        parts = recording, only_large(recording)
        all_bytes, large_bytes = (bytes_to_last(part, self._settings) for part in parts)
        return int(self._budget_bytes * (1 - ORDERS_ROOM)) - (all_bytes - large_bytes)

    def _failing(
        self, size: int, recording: Recording, variants: range | None = None
    ) -> int | None:
        large = only_large(recording)
        return failing_variant(large, self._limit(size), self._settings, variants)

    def guess_from(self, size: int, at_least: int = 1) -> Guess | None:
        """Guess by one recording; None if the guess is smaller, or if nothing grows."""
        reached = self._reach(size, at_least)
        return _guess(reached) if reached >= at_least else None

    def _reach(self, size: int, at_least: int) -> float:
        """Go down from where tensors alone fill the budget, to a size that lasts by a recording.

        Returns:
            That size, or the first that is below ``at_least``; infinity if nothing grows. A later
            call goes on from there.
        """
        scaled = self._scaled(size)
        end = scaled.end_of_tensors(self._limit(size))
        if math.isinf(end):
            return end
        every = variants_of(self._recordings[size])
        guess, variants = self._reached.get(size, (max(1, math.floor(end)), every))
        while variants and guess > 1 and guess >= at_least:
            failing = self._failing(size, scaled.at(guess), variants)
            if failing is None:
                variants = every[:0]
            else:
                guess = math.floor(guess * (1 - APART))
                variants = every[failing:]  # those before it last at smaller sizes too
        self._reached[size] = guess, variants
        return guess


def _guess(reached: float) -> Guess | None:
    return None if math.isinf(reached) else Guess(int(reached), deviation=DEVIATION)


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


def ended_a_step(recordings: Mapping[int, Recording], size: int) -> bool:
    """Return True if a size ended its first step, as its recording shows."""
    return size in recordings and bool(recordings[size].steps)


def just_below(recordings: Mapping[int, Recording], size: int) -> int:
    """Return the size of the confirmation that shows how one of a larger size ends; 0 if none does.

    It is no farther below than the final bracket is wide, and its steps differ: then replays decide
    what fits, so the larger size need not run.
    """
    near = whole_below(recordings, size)
    is_near = near and size - near <= differing_at(size)
    return near if is_near and steps_vary(recordings[near]) else 0
