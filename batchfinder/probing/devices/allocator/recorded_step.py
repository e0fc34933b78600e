"""Recorded steps as parts that can follow each other in another order. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from batchfinder.probing.devices.allocator.blocks import SMALL_BYTES
from batchfinder.search.prober import Recording

# Requests grow alike if they differ by at most this many bytes, because each is rounded; and the
# most requests in a piece of a loss (SFTTrainer's has 27).
ROUNDING_BYTES, MOST_IN_PIECE = 4096, 200


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step, and how it goes on from the one before.

    Attributes:
        events: the events, as in the recording.
        start: the number of blocks before its first one.
        count: the number of blocks that it requests.
        old: the blocks of the step before that it releases.
        left: its own blocks that the next step releases, counted from its first one. For the last
            step, all that it does not release.
        releases: how many blocks it releases that it did not request.
        leaves: how many of its own blocks it does not release.
    """

    events: Sequence[int]
    start: int
    count: int
    old: Sequence[int]
    left: Sequence[int]
    releases: int
    leaves: int

    def is_like(self, first: RecordedStep) -> bool:
        """Return True if this step can follow the first one, and itself."""
        return self.releases == len(self.old) == self.leaves == len(first.left)

    @cached_property
    def largest(self) -> int:
        """The bytes of its largest request; 0 if it makes none."""
        return max(requests_of(self.events), default=0)

    def mixed(self, other: RecordedStep, share: float, *, is_bounded: bool) -> RecordedStep:
        """Return a step whose requests are between those of this one and of another.

        Args:
            other: a step with the same :meth:`pattern`.
            share: 0 for the requests of this step, 1 for those of the other, 2 for as far beyond.
            is_bounded: True if no request is larger than both: of two lengths, as those of
                questions and answers, one may be longer in the step whose other one is shorter.
        """
        events = []
        for a, b in zip(self.events, other.events, strict=True):
            if a >= 0 and a != b:
                size = max(0, round(a + share * (b - a)))
                a = min(size, max(a, b)) if is_bounded else size
            events.append(a)
        return replace(self, events=events)

    def with_last_pieces(self, pieces: Mapping[int, int], share: float) -> RecordedStep:
        """Return a step whose last pieces (:func:`last_pieces`) have this share of a whole one."""
        if not pieces:
            return self
        requests, count, events = requests_of(self.events), itertools.count(), []
        for event in self.events:
            place = next(count) if event >= 0 else -1
            is_last = place in pieces
            events.append(max(1, round(share * requests[pieces[place]])) if is_last else event)
        return replace(self, events=events)

    def pattern(self) -> tuple[int, ...]:
        """Return the events without the bytes of their requests: equal for equal steps."""
        return tuple(min(event, 0) for event in self.at(len(self.old), range(len(self.old))))

    def at(self, start: int, old: Sequence[int]) -> list[int]:
        """Return the events after ``start`` other blocks, of which ``old`` are to be released."""
        released = {~mine: ~theirs for mine, theirs in zip(self.old, old, strict=True)}
        shift = start - self.start
        return [e if e >= 0 else released.get(e, e - shift) for e in self.events]


def steps_of(recording: Recording) -> Iterator[RecordedStep]:
    """Yield the recorded steps, each with how it goes on from the one before."""
    start, old = len(recording.held), list[int]()
    following = [*recording.steps, None][1:]
    counts = counts_of(recording.steps)
    for events, after, count in zip(recording.steps, following, counts, strict=True):
        released = {~event for event in events if event < 0}
        kept = [block for block in range(start, start + count) if block not in released]
        left = kept if after is None else sorted({~e for e in after if e < 0} & set(kept))
        releases = sum(block < start for block in released)
        relative = [block - start for block in left]
        yield RecordedStep(events, start, count, old, relative, releases, len(kept))
        start, old = start + count, left


def in_order(recording: Recording, order: Iterable[RecordedStep]) -> Recording:
    """Return a recording of the same steps in another order. Each can follow the one before."""
    steps, start, old = [], len(recording.held), list[int]()
    streams = [*recording.streams[:start]]
    for step in order:
        steps.append(step.at(start, old))
        streams += recording.streams[step.start : step.start + step.count]
        old = [start + block for block in step.left]
        start += step.count
    return Recording(recording.held, steps, streams)


def only_large(recording: Recording) -> Recording:
    """Return a recording without the requests of the small pool, and without their releases."""
    places: list[int] = []  # the new number of each block; -1 if it is left out
    streams: list[int] = []

    def large(events: Sequence[int]) -> list[int]:
        kept = []
        for event in events:
            if event >= 0:
                places.append(len(streams) if event > SMALL_BYTES else -1)
                if event > SMALL_BYTES:
                    streams.extend(recording.streams[len(places) - 1 : len(places)] or [0])
                    kept.append(event)
            elif places[~event] >= 0:
                kept.append(~places[~event])
        return kept

    held, steps, validations = (
        [*map(large, parts)] for parts in ([recording.held], recording.steps, recording.validations)
    )
    return recording._replace(held=held[0], steps=steps, validations=validations, streams=streams)


def steps_differ(recording: Recording) -> bool:
    """Return True if steps after the first make more or fewer requests, on the same input.

    Layers that are skipped at random do that.
    """
    return any(len({len(step) for step in alike}) > 1 for alike in _unlike_steps(recording))


def steps_vary(recording: Recording) -> bool:
    """Return True if other steps than the recorded ones are to be expected.

    Batches vary, or steps of the same input make other requests. If they only differ in bytes, as
    where a model routes its tokens to experts, they are like batches that vary in length.
    """
    return recording.batches_vary or bool(_unlike_steps(recording))


def _unlike_steps(recording: Recording) -> list[list[tuple[int, ...]]]:
    """Return the steps of each input, if some of one input make other large requests.

    The states of a second optimizer may appear after the first step, as in a script that trains a
    GAN. A step that only makes these besides is like the others.
    """
    unlike: list[list[tuple[int, ...]]] = []
    for each in (recording, _without_states(recording)):
        unlike = [alike for alike in _steps_of_the_same_input(each) if len(set(alike)) > 1]
        if not unlike:
            break
    return unlike


def _without_states(recording: Recording) -> Recording:
    """Return a recording without requests that are never released, as those of states.

    Steps that make no more requests than the last stay as they are: they make no states.
    """
    released = {~event for step in recording.steps for event in step if event < 0}
    blocks = itertools.count(len(recording.held))
    usual = len(requests_of(recording.steps[-1])) if recording.steps else 0

    def passing(step: Sequence[int]) -> list[int]:
        has_states = len(requests_of(step)) > usual
        kept = [e < 0 or next(blocks) in released or not has_states for e in step]
        return [*itertools.compress(step, kept)]

    return recording._replace(steps=[*map(passing, recording.steps)])


def _steps_of_the_same_input(recording: Recording) -> Iterable[list[tuple[int, ...]]]:
    """Return the large requests of the steps after the first, those of one input together.

    Steps of the same input share their first request, which is for the batch, and their largest.
    The smaller last batch of an epoch, for example, makes other requests, but no more than the
    others; a loss computed in pieces may make the same largest request for each length. Requests of
    the small pool do not count: scripts log a loss every few steps, and these use no memory that
    others need.
    """
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for requests in map(requests_of, recording.steps[1:]):
        large = tuple(size for size in requests if size > SMALL_BYTES)
        alike.setdefault((*requests[:1], max(requests, default=0)), []).append(large)
    return alike.values()


def in_use_after_steps(recording: Recording) -> Iterator[int]:
    """Yield the bytes that were requested and not released by the end of each step."""
    blocks = [*recording.held]
    in_use = sum(blocks)
    for step in recording.steps:
        blocks += requests_of(step)
        in_use += sum(event if event >= 0 else -blocks[~event] for event in step)
        yield in_use


def counts_of(steps: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of blocks that each step requests."""
    return [len(requests_of(step)) for step in steps]


def common_requests(steps: Iterable[Sequence[int]]) -> set[int]:
    """Return the bytes of the requests that all steps make. Most do not grow with the batch.

    Example:
        >>> sorted(common_requests([(8, 100, ~0), (8, 90), (8, 100, 90)]))
        [8]
    """
    every = [set(requests_of(step)) for step in steps]
    return set.intersection(*every) if every else set()


def last_pieces(requests: Sequence[int], fixed: Set[int]) -> dict[int, int]:
    """Return the places of requests that belong to a last, smaller one of several equal pieces.

    A loss may be made in pieces of as many tokens, as by TRL's SFTTrainer. The last piece has those
    that are left. Each of its requests is as large as the same one of a whole piece, or smaller by
    the same ratio.

    Args:
        requests: the bytes of each request of a step.
        fixed: the bytes of requests that do not grow with the batch, as those of whole pieces.

    Returns:
        By the place of each smaller one, that of the same request of the whole piece before.

    Example:
        >>> last_pieces([70_000, 50_000, 9, 30_000, 20_000, 9, 12_000], {50_000, 30_000, 9})
        {4: 1, 6: 3}
    """

    def ends(start: int, length: int) -> bool:
        whole, last = requests[start - length : start], requests[start : start + length]
        ratio = last[0] / whole[0]
        return all(
            a in fixed and (a == b or abs(ratio * a - b) <= ROUNDING_BYTES)
            for a, b in zip(whole, last, strict=True)
        )

    found = dict[int, int]()
    for start, size in enumerate(requests):
        if size in fixed or start in found or requests[start - 1] not in fixed:
            continue
        most = min(start, MOST_IN_PIECE, len(requests) - start)
        lengths = (each for each in range(2, most + 1) if requests[start - each] > size)
        if length := next((each for each in lengths if ends(start, each)), 0):
            places = (each for each in range(start, start + length) if requests[each] not in fixed)
            found.update((each, each - length) for each in places)
    return found


def scaled(events: Sequence[int], ratio: float, fixed: Set[int]) -> list[int]:
    """Return events whose requests are this many times as large, but for the fixed ones."""
    return [e if e < 0 or e in fixed else round(e * ratio) for e in events]


def requests_of(step: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of each request of a step."""
    return tuple(event for event in step if event >= 0)
