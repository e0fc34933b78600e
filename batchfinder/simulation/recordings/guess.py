"""The largest batch size, by replaying two recorded confirmations at other sizes. No torch.

A training step requests the same blocks at every batch size. Each block grows by the same amount
for each example. So recordings at two small sizes give the requests of a step at any size, for any
model and kernels. The simulated allocator shows whether those requests fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

from batchfinder.probing.devices.allocator.caching import AllocatorSettings
from batchfinder.probing.devices.allocator.expandable import allocator_of
from batchfinder.probing.devices.allocator.recorded import going_on
from batchfinder.probing.devices.allocator.recorded_step import steps_vary
from batchfinder.probing.place import batches_vary
from batchfinder.probing.steadiness import STEPS_THAT_MAY_FLUSH, PeakWatch
from batchfinder.results.probe import Outcome, Probe
from batchfinder.search.belief import APART
from batchfinder.search.head_start import Guess, HeadStart, MakeEstimate, worth_naming
from batchfinder.search.prober import Prober, Recording
from batchfinder.simulation.recordings.lasting import failing_variant, lasts, limit_of
from batchfinder.simulation.recordings.longer import (
    DEVIATION,
    LongerRecordings,
    ended_a_step,
    in_proportion,
    just_below,
    whole,
)
from batchfinder.simulation.recordings.scaled import ScaledRecording

# In a fragmented allocator a larger size may fit where a smaller does not. The guess is the largest
# size that ends a stretch of fitting ones, because a size between failing ones fits by luck. Sizes
# are one FINENESS-th apart, STRETCH of them below must fit, and FURTHEST above the end of bisection
# are tried. Of small sizes, fewer are so near: without cuDNN in 4 GiB, BERT base trains with 17 in
# bf16, never flushing the allocator's cache, where 16 flushes it in the third step.
FINENESS, STRETCH, FURTHEST = 200, 3, 10

# If more examples would fit, the recorded requests do not grow.
MOST_EXAMPLES = 2**40


def head_start_of(
    prober: Prober,
    least_steps: int,
    estimate: MakeEstimate | None = None,
    may_flush: int = STEPS_THAT_MAY_FLUSH,
) -> HeadStart:
    """Return the head start of a search that replays what a prober records, if it records anything.

    Args:
        prober: the prober that tries the sizes.
        least_steps: the fewest steps of a confirmation.
        estimate: makes the simulated estimate; None for none.
        may_flush: how many steps of a confirmation may flush the allocator's cache.
    """
    if (recordings := prober.recordings) is None:
        return HeadStart(estimate)

    def settings() -> AllocatorSettings:
        return AllocatorSettings.of(next((each.settings for each in recordings.values()), ""))

    def expand(guess: Callable[[AllocatorSettings], Guess | None]) -> Guess | None:
        now = settings()
        if now.expandable_segments:
            return None
        return guess(replace(now, expandable_segments=True))

    if batches_vary(prober):  # small batches have other lengths than large ones
        kept = cache(partial(LongerRecordings, recordings))

        def longer(allocator: AllocatorSettings) -> LongerRecordings:
            return kept(prober.budget_bytes, allocator)  # which the first steps may lower

        return HeadStart(
            estimate,
            lambda failure: longer(settings()).guess(failure),
            lambda size: longer(settings()).last(size),
            lambda size: longer(settings()).foresee(size),
            lambda answer: expand(
                lambda with_it: longer(with_it).guess_from(answer, worth_naming(answer, DEVIATION))
            ),
        )

    scaled = partial(scaled_guess, recordings, least_steps=least_steps, may_flush=may_flush)
    return HeadStart(
        estimate,
        lambda failure: scaled(prober.budget_bytes, settings(), failure=failure),
        lambda size: lasts(recordings.get(size), prober.budget_bytes, settings()),
        lambda size: foresees(recordings, size, prober.budget_bytes, settings()),
        lambda answer: expand(
            lambda with_it: scaled(prober.budget_bytes, with_it, at_least=worth_naming(answer))
        ),
    )


def scaled_guess(
    recordings: Mapping[int, Recording],
    budget_bytes: int,
    settings: AllocatorSettings,
    least_steps: int = 3,
    at_least: int = 1,
    failure: Probe | None = None,
    may_flush: int = STEPS_THAT_MAY_FLUSH,
) -> Guess | None:
    """Guess the largest size, from ``at_least`` on, whose steps fit when they are replayed.

    The largest recording is used, and the largest of those that are far enough from it; only the
    first, in proportion, if the lengths of batches differ.

    Returns:
        The guess, below the ``failure``; None if it is smaller, or if the recordings do not
        determine it, as where that failure fits by them but ran out of memory in its first step. If
        it did later, the guess is near it, and twice as far each time. It is unsure if none is
        above it, and steps of the larger one made other requests than those of the smaller, as
        kernels differ with the size.
    """
    large = max(_models(recordings), default=0)
    if (scaled := _scaled(recordings, large)) is None:
        return None
    limit_bytes = limit_of(recordings[large], budget_bytes)

    @cache
    def failing(batch_size: int, only: int | None = None) -> int | None:
        numbers = None if only is None else (only,)
        return failing_variant(scaled.at(batch_size), budget_bytes, settings, numbers)

    @cache
    def fits(batch_size: int) -> bool:
        watch = PeakWatch(
            limit_bytes, least_steps=least_steps, peaks_wander=False, may_flush=may_flush
        )
        if recordings[large].lengths_differ:
            watch.expect_variation(lengths_differ=True)
        return scaled.fits(batch_size, allocator_of(limit_bytes, settings), watch)

    failed = failure.batch_size if failure else MOST_EXAMPLES + 1
    ran_out = failure is not None and failure.outcome is Outcome.OOM
    if ran_out and fits(failed) and failing(failed) is None:
        if not ended_a_step(recordings, failed):
            return None
        # Its requests are as they should be: replays misjudge only what the allocator loses.
        farthest = max(size for size, each in recordings.items() if each.ran_out)
        return Guess(failed - max(1, farthest - failed))
    least = max([at_least, *(size for size in whole(recordings) if size < failed)])
    end = math.floor(min(failed, scaled.end_of_tensors(limit_bytes) + 1))
    if end <= least or end > MOST_EXAMPLES or not fits(least):
        return None
    size = _near_end(fits, least, end)
    # A confirmation of the guess is judged by this. It takes longer, so it comes last, and only the
    # variant that fails is replayed at smaller sizes.
    while (variant := failing(size)) is not None:
        if size == least or failing(least, variant) is not None:
            return None
        step = max(1, size // FINENESS)
        size = _largest(lambda smaller: failing(smaller, variant) is None, least, size, step)
    return Guess(size, scaled.is_matched or size < large)


def foresees(
    recordings: Mapping[int, Recording], size: int, budget_bytes: int, settings: AllocatorSettings
) -> bool:
    """Return True if the confirmation just below a size, scaled to it, does not last."""
    if (scaled := _scaled(recordings, just_below(recordings, size))) is None:
        return False
    return failing_variant(scaled.at(size), budget_bytes, settings) is not None


def _scaled(recordings: Mapping[int, Recording], large: int) -> ScaledRecording | None:
    """Return the confirmation at a size, to be scaled.

    None if none is recorded far below it.
    """
    known = whole(recordings)
    if large and recordings[large].lengths_differ:
        return in_proportion(recordings, large)
    # Sizes between it and another are asked for if it ran out of memory, so that may be near.
    most = APART * large if large in known else large
    if large:  # a script's validation may be recorded in some launches only
        ran = len(recordings[large].validations)
        known = {size: each for size, each in known.items() if len(each.validations) == ran}
    small = max((size for size in known if size <= most), default=0)
    if not small:
        return None
    # Where the last one failed, its first step shows requests that stop growing, or grow faster.
    far = min((size for size, each in recordings.items() if each.steps and size > large), default=0)
    model = known[large] if large in known else going_on(recordings[large])
    least = min(known)  # blocks of the farthest size hardly have the same bytes by chance
    return ScaledRecording.of_loop(least, known[least], large, model) or ScaledRecording.between(
        small, known[small], large, model, far, recordings.get(far)
    )


def _models(recordings: Mapping[int, Recording]) -> dict[int, Recording]:
    """Return the recordings, by size, that show how their steps go on.

    Those of confirmations that ran out of memory do if their last step can repeat. They are nearest
    to the limit, where kernels may make other requests than at small sizes.
    """
    known = whole(recordings)
    if any(each.validations or steps_vary(each) for each in known.values()):
        return known
    failed = {size: going_on(each) for size, each in recordings.items() if each.ran_out}
    return known | {size: each for size, each in failed.items() if each is not recordings[size]}


def _near_end(fits: Callable[[int], bool], least: int, end: int) -> int:
    """Return the largest size below ``end`` that a stretch of fitting sizes leads to.

    Args:
        fits: tells whether a size fits.
        least: a size that fits.
        end: a larger one. Most allocators lose little, so sizes near it are tried first.
    """
    low = _largest(fits, least, end, max(1, end // 1000))
    # Bisection ends at any of the boundaries. Take the last one that many fitting sizes lead to.
    step = max(1, low // FINENESS)
    top = min(FURTHEST - 1, (end - 1 - low) // step)
    length = min(STRETCH, STRETCH * low // FINENESS)
    while top > 0:
        stretch = sorted(range(top - length, top + 1), key=lambda place: place <= 0)
        gap = next((place for place in stretch if not fits(low + place * step)), None)
        if gap is None:
            break
        top = gap - 1
    return low + max(0, top) * step


def _largest(holds: Callable[[int], bool], low: int, high: int, width: int) -> int:
    """Return a size that holds, near one that does not: from ``low``, which holds, to ``high``.

    Args:
        holds: tells whether a size holds.
        low: a size that holds.
        high: a larger one that does not.
        width: how far below a size that does not hold the answer may be.
    """
    near = width
    while high - low > width:
        middle = max((low + high) // 2, high - near)
        low, high = (middle, high) if holds(middle) else (low, middle)
        near *= 2
    return low
