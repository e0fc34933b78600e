"""Replay a recorded confirmation for longer, in other orders too: would it last? No torch."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from batchfinder.probing.devices.allocator.caching import (
    AllocatorSettings,
    CachingAllocator,
    DeviceFullError,
)
from batchfinder.probing.devices.allocator.expandable import allocator_of
from batchfinder.probing.devices.allocator.recorded import Replay
from batchfinder.probing.devices.allocator.recorded_step import (
    RecordedStep,
    common_requests,
    in_order,
    last_pieces,
    requests_of,
    scaled,
    steps_differ,
    steps_of,
    steps_vary,
)
from batchfinder.probing.steadiness import SETTLING_STEPS, STEPS_THAT_MAY_FLUSH, with_room
from batchfinder.search.bracket import FAR_FROM_BUDGET
from batchfinder.search.plan import DIFFERING_ROOM
from batchfinder.search.prober import Recording
from batchfinder.simulation.recordings.side_by_side import first_that_fails

# Steps that a confirmation must last when it is replayed. MobileNet's answers of 513 and 521
# (mobilenet-24 of scripts/benchmarks/parts/setup_list.py) run out of memory in the fourth and the
# fifth.
LASTING_STEPS = 12

# Orders in which steps that differ are replayed, and the steps of each (wav2vec2-80 of that list,
# which skips layers at random: 280 ran out of memory in the second step, 295 in the eighth).
ORDERS, ORDERED_STEPS = 6, 30

# Orders of batches of varying length. Each begins with another batch, and has ORDERED_STEPS steps.
# The longest batch rarely comes first: of four trainings of lightning-24 at 150, two ran out of
# memory, in steps 15 and 20. So do 3 of these 24, and none of 6 that begin with the longest.
BEGINNINGS = 24

# The largest share of their steps that may flush the allocator's cache: more is slow. Guesses from
# six recordings are the same for shares of 0.2 to 1; under expandable segments, where blocks of any
# length fit but each new one is mapped, 0.2 gives what searches there answer, within 5 %, and 1 up
# to 20 % more.
MOST_FLUSHING = 0.2

# Batches of varying length are drawn between two recorded ones, or as far below the smaller: a
# confirmation sees three lengths, an epoch hundreds. Set-up lightning-24 was answered 159 without
# such replays, which ran out of memory with two seeds of three within 20 steps; with them 148.
FARTHEST = 2.0

# It takes about a second to replay this many events, and a tenth of that to start processes.
WORTH_PROCESSES = 10**6


def lasts(recording: Recording | None, budget_bytes: int, settings: AllocatorSettings) -> bool:
    """Return True if a recorded confirmation can go on for LASTING_STEPS steps.

    They are replayed as recorded, as in a loop that releases each batch before it copies the next,
    and as in one whose step is a function. What a fragmented allocator loses depends on such
    details. Steps that differ, such as those of a model that skips layers at random, may only flush
    the cache at the beginning: a size whose replays did later (282 of wav2vec2-80) ran out of
    memory in two real loops of three.
    Equal steps that flush after SETTLING_STEPS go on to do so. Batches of varying length flush now
    and then, as blocks of shorter ones are too small for longer ones, and a training may begin with
    any of them: if no step might flush, a Whisper got 19 for 26. If the steps of equal batches
    differ, some of the budget is kept free. An unknown confirmation (None) counts as lasting.
    """
    return recording is None or failing_variant(recording, budget_bytes, settings) is None


def failing_variant(
    recording: Recording,
    budget_bytes: int,
    settings: AllocatorSettings,
    numbers: Sequence[int] | None = None,
) -> int | None:
    """Return the number of the first variant that does not last; None if all do.

    Args:
        recording: a confirmation. For its variants, see :func:`_variants`.
        budget_bytes: the bytes that the allocator may reserve.
        settings: settings of the allocator.
        numbers: those of the variants to replay; None for all.
    """
    if not recording.steps:
        return None
    first, *others = variants_of(recording) if numbers is None else numbers
    limit_bytes = limit_of(recording, budget_bytes)
    allocator = allocator_of(limit_bytes, settings)
    variant = next(_variants(recording, [first]), None)
    if variant and not _lasts_in(allocator, variant, *_may_flush(recording)):
        return first
    if allocator.reserved_bytes < FAR_FROM_BUDGET * limit_bytes:
        return None  # no other variant needs twice as much
    last = partial(_last, recording, limit_bytes, settings)
    events = max(map(len, recording.steps)) * ORDERED_STEPS * len(others)
    if events > WORTH_PROCESSES:
        return first_that_fails(last, others)
    return next((n for n, lasts in zip(others, last(others), strict=False) if not lasts), None)


def _last(
    recording: Recording, limit_bytes: int, settings: AllocatorSettings, numbers: Sequence[int]
) -> Iterator[bool]:
    """Yield for each of these variants whether it lasts; nothing for those that do not exist."""
    may_flush = _may_flush(recording)
    for variant in _variants(recording, numbers):
        yield _lasts_in(allocator_of(limit_bytes, settings), variant, *may_flush)


def _may_flush(recording: Recording) -> tuple[float, float]:
    """Return the step from which on only a share of them may flush the cache, and that share."""
    quiet_from: float = STEPS_THAT_MAY_FLUSH if steps_vary(recording) else SETTLING_STEPS
    if recording.lengths_differ:  # a script's launch ran for long enough to see whether it settles
        quiet_from = math.inf
    return quiet_from, MOST_FLUSHING if recording.batches_vary else 0


def _lasts_in(
    allocator: CachingAllocator, variant: Recording, quiet_from: float, share: float
) -> bool:
    """Return True if the steps fit, and from one on only this share of them flushes the cache.

    If they are fewer than LASTING_STEPS, the last ones are repeated.
    """
    most = share * max(LASTING_STEPS, len(variant.steps))
    flushing = 0
    try:
        for number, flushes in enumerate(_flushes(variant, allocator)):
            flushing += flushes > 0 and number >= quiet_from
            if flushing > most:
                return False
    except DeviceFullError:
        return False
    return True


def _flushes(variant: Recording, allocator: CachingAllocator) -> Iterator[int]:
    """Replay a confirmation, its later steps and its validations; yield the flushes of each step.

    Raises:
        DeviceFullError: the device runs out of memory.
    """
    replay = Replay(variant, allocator)
    for _, flushes in replay.steps(max(LASTING_STEPS, len(variant.steps))):
        yield flushes
    replay.validations()


def variants_of(recording: Recording) -> range:
    """Return the numbers of all variants of a recording."""
    return range(3 + (BEGINNINGS if recording.batches_vary else ORDERS))


def _variants(recording: Recording, numbers: Sequence[int]) -> Iterator[Recording]:
    """Yield variants of a recording: of steps that may come instead or later.

    Variant 0 is the recording, 1 releases each batch early, 2 all that a step leaves. All others
    are orders of its steps.
    """
    if 0 in numbers:
        yield recording
    if 1 in numbers:
        yield releasing_early(recording)
    if 2 in numbers:
        yield releasing_all(recording)
    yield from in_other_orders(recording, [number - 3 for number in numbers if number >= 3])


def bytes_to_last(variant: Recording, settings: AllocatorSettings) -> int:
    """Return the bytes that the steps of a confirmation, and later ones, reserve without a limit.

    With these bytes, the allocator never flushes its cache.
    """
    allocator = allocator_of(math.inf, settings)
    for _ in Replay(variant, allocator).steps(max(LASTING_STEPS, len(variant.steps))):
        pass
    return allocator.reserved_bytes  # which without a limit never falls


def limit_of(recording: Recording, budget_bytes: int) -> int:
    """Return the bytes that a replay may use: less of the budget if steps of one input differ."""
    if steps_differ(recording):
        return int(budget_bytes * (1 - DIFFERING_ROOM))
    # Where batches vary, the caller has left that room already.
    has_room = recording.batches_vary or recording.lengths_differ
    return budget_bytes if has_room or not steps_vary(recording) else with_room(budget_bytes)


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


def releasing_all(recording: Recording) -> Recording:
    """Return a recording whose steps begin with all releases of what earlier steps left.

    A function drops its variables when it ends. A WGAN-GP lasted with 2799 in both other ways, and
    ran out of memory in the second step of a loop that called its step.
    """
    steps, known = [], len(recording.held)
    for step in recording.steps:
        left = range(len(recording.held), known)
        old = [event for event in step if ~event in left]
        steps.append([*old, *(event for event in step if ~event not in left)])
        known += sum(event >= 0 for event in step)
    return recording._replace(steps=steps)


def in_other_orders(
    recording: Recording, seeds: Iterable[int] = range(ORDERS)
) -> Iterator[Recording]:
    """Yield recordings of ORDERED_STEPS such steps, drawn after the first, one for each seed.

    The first is as recorded, or scaled to the batch of another one if batches vary.

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
    begun = _beginning(recording, first, pool) if recording.batches_vary else None
    for seed in seeds:
        draw = random.Random(seed)
        # The longest batch was recorded, if batches vary in length.
        another = partial(_drawn, kinds, draw, is_bounded=recording.batches_vary)
        drawn = [another() for _ in range(ORDERED_STEPS)]
        yield in_order(recording, begun(another(), drawn, draw) if begun else [first, *drawn])


def _beginning(
    recording: Recording, first: RecordedStep, pool: Sequence[RecordedStep]
) -> Callable[[RecordedStep, Sequence[RecordedStep], random.Random], list[RecordedStep]]:
    """Return a function that begins a training with the first step, given the batch of another.

    Optimizer states stay as large. How many tokens are left for the last piece of a loss is drawn:
    428 of an SFTTrainer with ``assistant_only_loss`` ran out of memory in the second step, with one
    seed of two, where each beginning of recorded pieces lasts.

    Args:
        recording: all steps.
        first: the first of them.
        pool: the steps that others are drawn from.
    """
    fixed = common_requests(recording.steps).union(recording.held)
    pieces = {step.start: last_pieces(requests_of(step.events), fixed) for step in (first, *pool)}

    def growing(step: RecordedStep) -> int:
        return sum(size for size in requests_of(step.events) if size not in fixed)

    most = max(1, *map(growing, pool))

    def begun(
        other: RecordedStep, drawn: Sequence[RecordedStep], draw: random.Random
    ) -> list[RecordedStep]:
        events = scaled(first.events, min(1, growing(other) / most), fixed)
        order = [replace(first, events=events), *drawn]
        return [each.with_last_pieces(pieces[each.start], draw.random()) for each in order]

    return begun


def _drawn(
    kinds: Sequence[Sequence[RecordedStep]], draw: random.Random, *, is_bounded: bool
) -> RecordedStep:
    """Draw a step of any kind, or one between two of that kind, or somewhat below both."""
    smaller, larger = sorted(draw.choices(draw.choice(kinds), k=2), key=lambda step: step.largest)
    return larger.mixed(smaller, draw.uniform(0, FARTHEST), is_bounded=is_bounded)
