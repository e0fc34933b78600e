"""Replay a recorded confirmation for more steps than it had, in other orders too. No torch."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

from batchfinder.probing.devices.allocator.caching import (
    AllocatorSettings,
    DeviceFullError,
)
from batchfinder.probing.devices.allocator.expandable import allocator_of
from batchfinder.probing.devices.allocator.recorded import Replay
from batchfinder.probing.devices.allocator.recorded_step import (
    RecordedStep,
    in_order,
    only_large,
    requests_of,
    steps_differ,
    steps_of,
    steps_vary,
)
from batchfinder.probing.steadiness import STEPS_THAT_MAY_FLUSH, with_room
from batchfinder.search.bracket import FAR_FROM_BUDGET, differing_at
from batchfinder.search.head_start import Guess
from batchfinder.search.prober import Recording

# Steps that a confirmation must last when it is replayed. MobileNet's answers of 513 and 521
# (mobilenet-24 of scripts/benchmarks/parts/setup_list.py) run out of memory in the fourth and the
# fifth.
LASTING_STEPS = 12

# Orders in which steps that differ are replayed, and the steps of each (wav2vec2-80 of that list,
# which skips layers at random: 280 ran out of memory in the second step, 295 in the eighth).
ORDERS, ORDERED_STEPS = 6, 30

# Steps of those orders where batches vary in length, the size is not far from the budget, and one of
# the shorter orders needs more than the recorded one. With 30, 150 of lightning-24 lasted in all
# six, and ran out of memory in one training of four, in its 20th step; with 120, four need more.
MANY_STEPS = 120

# Batches of varying length are drawn between two recorded ones, or as far below the smaller: a
# confirmation sees three lengths, an epoch hundreds. Set-up lightning-24 was answered 159 without
# such replays, which ran out of memory with two seeds of three within 20 steps; with them 148.
FARTHEST = 2.0

# A guess replays this many sizes besides a recorded one. It is this near the answer, as a share: in
# searches of six set-ups of scripts/benchmarks/parts/setup_list.py whose lengths vary, guesses from
# a quarter of the answer and more were 8 % below it to 9 % above.
REPLAYED_GUESSES, DEVIATION = 1, 0.04

# Fraction of the budget kept free in replays of steps that differ: training will make steps that
# were not recorded. With 5 % free, 280 of wav2vec2-80 passed in one search of ten, and ran out of
# memory in one loop of four.
DIFFERING_ROOM = 0.1


def lasts(recording: Recording | None, budget_bytes: int, settings: AllocatorSettings) -> bool:
    """Return True if a recorded confirmation can go on for LASTING_STEPS steps.

    They are replayed as recorded, and as in a loop that releases each batch before it copies the
    next. What a fragmented allocator loses depends on such details. Batches of varying length may
    not even flush the cache, nor may steps that differ, such as those of a model that skips layers
    at random, after the first ones: a size whose replays did (282 of wav2vec2-80) ran out of memory
    in two real loops of three. If the steps of equal batches differ, some of the budget is kept
    free. An unknown confirmation (None) counts as lasting.
    """
    return recording is None or failing_variant(recording, budget_bytes, settings) is None


def failing_variant(
    recording: Recording, budget_bytes: int, settings: AllocatorSettings, only: int | None = None
) -> int | None:
    """Return the number of the first variant (:func:`going_on`) that does not last; None if all do.

    Args:
        recording: a confirmation.
        budget_bytes: the bytes that the allocator may reserve.
        settings: settings of the allocator.
        only: the number of the variant to replay. Default: all.
    """
    if not recording.steps:
        return None
    limit_bytes = limit_of(recording, budget_bytes)
    quiet_from = STEPS_THAT_MAY_FLUSH if steps_vary(recording) else math.inf
    if recording.batches_vary:
        quiet_from = 0
    for place, variant in enumerate(going_on(recording)):
        if only not in (None, place):
            continue
        try:
            replay = Replay(variant, allocator_of(limit_bytes, settings))
            steps = replay.steps(max(LASTING_STEPS, len(variant.steps)))
            if any(flushes and number >= quiet_from for number, (_, flushes) in enumerate(steps)):
                return place
            replay.validations()
        except DeviceFullError:
            return place
    return None


def going_on(recording: Recording, steps: int = ORDERED_STEPS) -> Iterator[Recording]:
    """Yield a recording, and others of steps that may come instead or later.

    Those in other orders have this many steps.
    """
    yield recording
    yield releasing_early(recording)
    yield from in_other_orders(recording, steps)


def bytes_to_last(variant: Recording, settings: AllocatorSettings) -> int:
    """Return the bytes that a confirmation and its later steps reserve if nothing limits them.

    With these bytes, the allocator never flushes its cache.
    """
    allocator = allocator_of(None, settings)
    replay = Replay(variant, allocator)
    for _ in replay.steps(max(LASTING_STEPS, len(variant.steps))):
        pass
    replay.validations()
    return allocator.reserved_bytes  # which without a limit never falls


class Needs(NamedTuple):
    """The bytes that a confirmation needs in order to last.

    Attributes:
        most: what the variant (:func:`going_on`) needs that needs most.
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
    """

    def __init__(
        self, recordings: Mapping[int, Recording], budget_bytes: int, settings: AllocatorSettings
    ) -> None:
        self._recordings, self._settings = recordings, settings
        self._budget_bytes = budget_bytes
        self._needs = cache(self._needs_of)
        self._guess_from = cache(self._guessed_from)

    def last(self, size: int) -> bool:
        """Return True if the confirmation at a size lasts, as :func:`lasts` does."""
        recording = self._recordings.get(size)
        return not (recording and recording.steps) or self._needs(size).most <= self._limit(size)

    def foresee(self, size: int) -> bool:
        """Return True if the confirmation just below a size, scaled to it, does not last."""
        below = just_below(self._recordings, size)
        guess = self._guess_from(below) if below else None
        return guess is not None and guess.size < size

    def guess(self) -> Guess | None:
        """Guess the largest size that lasts, by the largest recordings: the smallest that one says.

        What lengths the steps of a recording have is chance. Those before a step that ran out of
        memory count too.
        """
        sizes = [size for size, each in self._recordings.items() if len(each.steps) > 2]
        large = (self._guess_from(size) for size in sizes if 2 * size >= max(sizes))
        return min(filter(None, large), key=lambda guess: guess.size, default=None)

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
        recording, needs = self._recordings[size], self._needs(size)
        guess, needed, held = size, needs.most, sum(recording.held)
        limit_bytes = self._limit(size)
        for number in range(REPLAYED_GUESSES + 1):
            if number:  # the variant that needs most at one size needs most at another
                large = only_large(self._scaled(size, guess / size))
                # Small requests that are large here may leave nothing to exchange.
                variant = next(islice(going_on(large, needs.steps), needs.worst, None), large)
                needed = needs.small + bytes_to_last(variant, self._settings)
            if needed <= held:
                return None  # nothing grows
            guess = max(1, math.floor(guess * (limit_bytes - held) / (needed - held)))
        return Guess(guess, deviation=DEVIATION)

    def _scaled(self, size: int, ratio: float) -> Recording:
        """Return what a confirmation of this many times the examples would request.

        Requests grow in proportion, but for those that all steps of this and the next smaller size
        make.
        """
        recording, known = self._recordings[size], whole(self._recordings)
        largest = sorted(each for each in known if each <= size)[-2:]
        steps = [set(requests_of(step)) for each in largest for step in known[each].steps]
        fixed = set.intersection(*steps) if steps else set()

        def at_ratio(steps: Sequence[Sequence[int]]) -> list[list[int]]:
            grown = ((e if e < 0 or e in fixed else round(e * ratio) for e in s) for s in steps)
            return [*map(list, grown)]

        return recording._replace(
            steps=at_ratio(recording.steps), validations=at_ratio(recording.validations)
        )


def whole(recordings: Mapping[int, Recording]) -> dict[int, Recording]:
    """Return the recordings, by size, of confirmations that did not run out of memory."""
    return {size: each for size, each in recordings.items() if each.steps and not each.ran_out}


def just_below(recordings: Mapping[int, Recording], size: int) -> int:
    """Return the size of the confirmation that shows how one of a larger size ends; 0 if none does.

    It is no farther below than the final bracket is wide, and its steps differ: then replays decide
    what fits, so the larger size need not run.
    """
    near = max((each for each in whole(recordings) if each < size), default=0)
    is_near = near and size - near <= differing_at(size)
    return near if is_near and steps_vary(recordings[near]) else 0


def limit_of(recording: Recording, budget_bytes: int) -> int:
    """Return the bytes that a replay may use: less of the budget if steps of one input differ."""
    if steps_differ(recording):
        return int(budget_bytes * (1 - DIFFERING_ROOM))
    # Where batches vary, the caller has left that room already.
    only_bytes_vary = steps_vary(recording) and not recording.batches_vary
    return with_room(budget_bytes) if only_bytes_vary else budget_bytes


def releasing_early(recording: Recording) -> Recording:
    """Return a recording whose steps begin with the releases that follow their first requests."""
    steps, known = [], len(recording.held)
    for step in recording.steps:
        start = next((i for i, event in enumerate(step) if event < 0), len(step))
        end = next((i for i in range(start, len(step)) if step[i] >= 0), len(step))
        old = [event for event in step[start:end] if ~event < known]
        new = [event for event in step[start:end] if ~event >= known]
        steps.append([*old, *step[:start], *new, *step[end:]])
        known += sum(event >= 0 for event in step)
    return recording._replace(steps=steps)


def in_other_orders(recording: Recording, steps: int = ORDERED_STEPS) -> Iterator[Recording]:
    """Yield recordings of this many such steps, drawn at random after the first.

    Nothing is yielded if no other steps are to be expected, or if fewer than two of them can be
    exchanged: those that release what the step before left, and leave as many blocks themselves.
    """
    if not steps_vary(recording):
        return
    first, *later = steps_of(recording)
    pool = [step for step in later if step.is_like(first)]
    if len(pool) < 2:
        return
    if recording.batches_vary:  # they came in rounds, and each counts once
        pool = [*{requests_of(step.events): step for step in pool}.values()]
    alike = defaultdict(list)
    for step in pool:
        # The smaller last batch of an epoch is of another kind, unless batches are drawn from many.
        kind = 0 if recording.batches_vary else step.largest
        alike[kind, step.pattern()].append(step)
    kinds = [steps for steps in alike.values() for _ in steps]
    for seed in range(ORDERS):
        draw = random.Random(seed)
        yield in_order(recording, [first, *(_drawn(kinds, draw) for _ in range(steps))])


def _drawn(kinds: Sequence[Sequence[RecordedStep]], draw: random.Random) -> RecordedStep:
    """Draw a step of any kind, or one between two of that kind, or somewhat below both."""
    smaller, larger = sorted(draw.choices(draw.choice(kinds), k=2), key=lambda step: step.largest)
    return larger.mixed(smaller, draw.uniform(0, FARTHEST))
