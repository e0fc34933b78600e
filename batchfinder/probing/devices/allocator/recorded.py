"""Replay the recorded steps of a confirmation, and see how it goes on. Imports no torch."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

from batchfinder.probing.devices.allocator.caching import (
    AllocatorSettings,
    CachingAllocator,
    DeviceFullError,
)
from batchfinder.probing.devices.allocator.expandable import allocator_of
from batchfinder.probing.devices.allocator.recorded_step import (
    counts_of,
    in_order,
    in_use_after_steps,
    requests_of,
    steps_of,
)
from batchfinder.probing.steadiness import LEAK_BYTES, PeakWatch
from batchfinder.search.prober import Recording

# Validations that a training must last, each with a step after it. With a GPT, 80 ran out of memory
# in the third (train_gpt.py of scripts/examples with width 512, depth 5 and 32,000 words, 100
# examples a validation).
LASTING_VALIDATIONS = 10


class Replay:
    """Replays the requests of a recording, step by step, in a fresh allocator.

    Raises:
        DeviceFullError: the device runs out of memory; from its methods too.
    """

    def __init__(self, recording: Recording, allocator: CachingAllocator) -> None:
        self._recording, self._allocator = recording, allocator
        events = sum(map(len, [*recording.steps, *recording.validations]))
        self._streams = recording.streams or [0] * (len(recording.held) + events)
        held = zip(recording.held, self._streams, strict=False)
        self._blocks = [allocator.malloc(size, stream) if size else None for size, stream in held]
        allocator.release_cached()
        self._done = self._shift = 0  # the recorded steps so far, and the blocks of repeated ones

    def steps(self, most_steps: int) -> Iterator[tuple[int, int]]:
        """Replay steps; yield each one's peak of reserved bytes, and its flushes of the cache.

        After the recorded steps, the last ones are repeated; see :func:`_repeating_last`.
        """
        allocator, steps = self._allocator, self._recording.steps
        first = len(self._recording.held)
        goes_on = partial(_leaves_as_much, self._recording)
        for place, self._shift in _repeating_last(steps, most_steps, first, goes_on):
            retries = allocator.retries
            allocator.peak_reserved_bytes = allocator.reserved_bytes
            self._done = place + 1
            self._replay(steps[place])
            yield allocator.peak_reserved_bytes, allocator.retries - retries

    def validations(self) -> None:
        """Replay the validations, if there are any, after all recorded steps that are left.

        The last ones come again, LASTING_VALIDATIONS of them; see :func:`_validations_again`.
        """
        recording = self._recording
        if not recording.validations:
            return
        end = _end_of(recording, len(recording.validations))
        start = _end_of(recording, len(recording.validations) - _last_validations(recording))
        self._streams = [*self._streams[:end]]
        self._streams += self._streams[start:end] * LASTING_VALIDATIONS
        again = _validations_again(recording)
        for events in (*recording.steps[self._done :], *recording.validations, *again):
            self._replay(events)

    def _replay(self, events: Sequence[int]) -> None:
        malloc, free, blocks = self._allocator.malloc, self._allocator.free, self._blocks
        streams, shift = self._streams, self._shift
        first = len(self._recording.held)  # blocks held from the start are the same in every step
        for event in events:
            if event >= 0:
                blocks.append(malloc(event, streams[len(blocks) - shift]) if event else None)
            else:
                index = ~event if ~event < first else ~event + shift
                block, blocks[index] = blocks[index], None
                if block is not None:
                    free(block)


def _repeating_last(
    steps: Sequence[Sequence[int]],
    most_steps: int,
    first: int,
    goes_on: Callable[[int], bool],
) -> Iterator[tuple[int, int]]:
    """Yield the places of recorded steps, and the number of blocks that repeats requested before.

    After them come those after an earlier step that made as many requests as the last, again and
    again. If there is none, nothing comes; nor if steps that far apart do not go on as they did.
    """
    for number in range(min(most_steps, len(steps))):
        yield number, 0
    counts = counts_of(steps)
    period = _period(steps, counts, first) if most_steps > len(steps) else 0
    end = most_steps if period and goes_on(period) else 0
    for number in range(len(steps), end):
        repeats = (number - len(steps)) // period + 1
        yield number - repeats * period, repeats * sum(counts[-period:])


def _period(steps: Sequence[Sequence[int]], counts: Sequence[int], first: int) -> int:
    """Return how many of the last steps come again; 0 if none can. ``first`` is their first block.

    Of several, they are those whose repeats find most of the blocks that they release.
    """
    released = {~event for step in steps for event in step if event < 0}

    def missing(period: int) -> int:
        shift = sum(counts[-period:])
        start = first + sum(counts) - shift
        old = {~e for step in steps[-period:] for e in step if first <= ~e < start}
        return sum(block + shift in released for block in old)

    periods = (n for n in range(1, len(steps)) if counts[-1 - n] == counts[-1])
    return min(periods, key=missing, default=0)


def _end_of(recording: Recording, validations: int) -> int:
    """Return the number of blocks that come before the end of this many validations."""
    parts = [*recording.steps, *recording.validations[:validations]]
    return len(recording.held) + sum(counts_of(parts))


def _last_validations(recording: Recording) -> int:
    """Return how many of the last validations come again; all of them, if no two are alike."""
    validations = recording.validations
    period = _period(validations, counts_of(validations), _end_of(recording, 0))
    return period or len(validations)


def _validations_again(recording: Recording) -> Iterator[list[int]]:
    """Yield the events of LASTING_VALIDATIONS further validations, the last ones again and again.

    They release blocks of the step before, such as its batch. Then it is their own last step that
    left such blocks: of the same bytes, else the next in order. Other blocks pile up.
    """
    period = _last_validations(recording)
    last = recording.validations[-period:]
    parts = [*recording.steps, *recording.validations]
    sizes = [*recording.held, *(size for part in parts for size in requests_of(part))]
    start, end = len(sizes) - sum(counts_of(last)), len(sizes)
    released = {~event for part in last for event in part if event < 0}
    old = [block for block in sorted(released) if len(recording.held) <= block < start]
    left: defaultdict[int, deque[int]] = defaultdict(deque)  # by their bytes
    for block in range(start, end):
        if block not in released:
            left[sizes[block]].append(block)
    takes_over = {block: left[sizes[block]].popleft() for block in old if left[sizes[block]]}
    missing = [block for block in old if block not in takes_over]
    takes_over |= zip(missing, sorted(chain.from_iterable(left.values())), strict=False)
    for number in range(LASTING_VALIDATIONS):
        shift = (1 + number // period) * (end - start)
        # What was there from the beginning, or has no successor, was released the first time.
        moved = {block: after + shift - (end - start) for block, after in takes_over.items()}
        moved |= {block: block + shift for block in range(start, end)}
        events = last[number % period]
        yield [e if e >= 0 else ~moved[~e] for e in events if e >= 0 or ~e in moved]


def _leaves_as_much(recording: Recording, period: int) -> bool:
    """Return False if only the last steps, this many apart, left more in use.

    Python's garbage collector may free batches in some steps only. Repeats of a step in which it
    did not would run out of memory: a fastai script was answered 768 where 1340 trains. Where
    batches vary, so does what a step keeps until the next.
    """
    if recording.batches_vary:
        return True
    in_use = [*in_use_after_steps(recording)]
    growths = [after - before for before, after in zip(in_use, in_use[period:], strict=False)]
    return not growths or not growths[-1] >= LEAK_BYTES > min(growths)


def foreseen(
    record: Callable[[], Mapping[str, Any] | None], watch: PeakWatch, budget_bytes: int
) -> PeakWatch:
    """Return a watch of a confirmation that also saw the steps that would follow, as simulated.

    The simulation is believed if it reproduces, to the byte, the peak of each step that ran.
    One step before a confirmation may end, it may show that steps like the last would run out
    of memory, or flush the cache. That they stay quiet is only believed once the last two steps
    made the same requests. Otherwise the watch is returned as it is: real steps have to show
    it. The watch itself is not changed.
    """
    if watch.is_over or not watch.may_end_next or not (recorded := record()):
        return watch
    recording = Recording(**recorded)
    repeats = len(set(map(requests_of, recording.steps[-2:]))) == 1
    later = deepcopy(watch)
    allocator = allocator_of(budget_bytes, AllocatorSettings.of(recording.settings))
    replay = Replay(recording if repeats else going_on(recording), allocator)
    seen: list[int] = []
    try:
        for peak, flushes in replay.steps(watch.most_steps):
            seen.append(peak)
            if len(seen) > len(watch.peaks):
                later.note(peak, flushes)
            if later.is_over:
                break
    except DeviceFullError:
        later.run_out()
    if seen[: len(watch.peaks)] != watch.peaks:
        return watch
    may_pass = watch.may_end and repeats and later.is_settled and not later.objection()
    return later if later.is_refused or may_pass else watch


def going_on(recording: Recording) -> Recording:
    """Return a recording with one more step like the last, if that step can follow itself."""
    steps = [*steps_of(recording)]
    can_follow = len(steps) > 1 and steps[-1].is_like(steps[-1])
    return in_order(recording, [*steps, steps[-1]]) if can_follow else recording
