from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain

import pytest
from fakes import FakeProber

from batchfinder.probing.devices.allocator.caching import AllocatorSettings
from batchfinder.results.probe import Outcome, Probe
from batchfinder.search.prober import Recording
from batchfinder.simulation.recordings.guess import foresees, head_start_of, scaled_guess
from batchfinder.simulation.recordings.lasting import (
    in_other_orders,
    lasts,
)
from batchfinder.simulation.recordings.pairing import paired
from batchfinder.units import MIB


def recorded(batch_size: int, *extra: int) -> Recording:
    """Four steps that hold 4 MiB for each example at once, beside weights of 100 MiB."""
    steps = []
    for step in range(4):
        asked = [MIB * batch_size, 2 * MIB * batch_size, MIB * batch_size, *extra]
        first = 1 + len(asked) * step
        steps.append([*asked, *(~(first + i) for i in range(len(asked)))])
    return Recording([100 * MIB], steps)


def test_two_small_recordings_tell_the_largest_size() -> None:
    recordings = {2: recorded(2), 20: recorded(20)}
    guess = scaled_guess(recordings, 500 * MIB, AllocatorSettings())
    assert guess is not None
    assert 97 <= guess.size <= 100
    assert guess.is_sure


@pytest.mark.parametrize("expands", [True, False])
def test_replays_have_the_settings_that_the_code_has_made(expands: bool) -> None:
    """Of 44 blocks of 11 MiB, each gets a segment of 12 MiB, or all of them one of 500 MiB."""
    steps = [[*[11 * MIB] * 44, *(~(44 * n + i) for i in range(44))] for n in range(4)]
    settings = "expandable_segments:True" if expands else ""
    recordings = {2: recorded(2), 44: Recording([], steps, settings=settings)}
    recordings = {n: each._replace(settings=settings) for n, each in recordings.items()}
    head_start = head_start_of(FakeProber(budget_bytes=500 * MIB, recordings=recordings), 3)
    assert head_start.lasts(44) is expands
    assert (head_start.expand(2) is None) is expands


@pytest.mark.parametrize("differ", [True, False])
def test_where_lengths_differ_a_smaller_batch_tells_nothing(differ: bool) -> None:
    """The longest example of two is twice as long as that of 20."""
    recordings = {
        2: recorded(2)._replace(steps=[[e * 2 if e > 0 else e for e in recorded(2).steps[0]]] * 4),
        20: recorded(20),
    }
    recordings = {n: each._replace(lengths_differ=differ) for n, each in recordings.items()}
    guess = scaled_guess(recordings, 500 * MIB, AllocatorSettings())
    assert guess is not None
    assert (97 <= guess.size <= 100) is differ


def test_more_fits_if_the_third_step_may_flush_the_cache() -> None:
    def joined_once(batch_size: int) -> Recording:
        """The third step holds as much as the others, in one block."""
        recording = recorded(batch_size)
        steps = [*recording.steps[:2], [4 * MIB * batch_size, ~7]]
        return recording._replace(
            steps=[*steps, [e if e > 0 else e + 2 for e in recording.steps[3]]]
        )

    recordings = {2: joined_once(2), 20: joined_once(20)}
    strict = scaled_guess(recordings, 500 * MIB, AllocatorSettings())
    lenient = scaled_guess(recordings, 500 * MIB, AllocatorSettings(), may_flush=3)
    assert strict is not None
    assert lenient is not None
    assert strict.size <= 50
    assert 97 <= lenient.size <= 100


def test_steps_with_more_micro_batches_tell_it_too() -> None:
    """An optimizer's requests end each step, and do not grow with the batch."""

    def accumulated(batch_size: int) -> Recording:
        micro_batches, number, steps = 80 // batch_size, 1, []
        for _ in range(4):
            step: list[int] = []
            for _ in range(micro_batches):
                step += [3 * batch_size * MIB, batch_size * MIB, ~number, ~(number + 1)]
                number += 2
            steps.append([*step, *[20 * MIB] * 8, *(~(number + i) for i in range(8))])
            number += 8
        return Recording([100 * MIB], steps)

    recordings = {2: accumulated(2), 8: accumulated(8)}
    guess = scaled_guess(recordings, 500 * MIB, AllocatorSettings())
    assert guess is not None
    assert 95 <= guess.size <= 100


def test_a_guess_is_unsure_if_the_larger_step_makes_other_requests() -> None:
    recordings = {2: recorded(2), 20: recorded(20, 8 * MIB)}
    guess = scaled_guess(recordings, 500 * MIB, AllocatorSettings())
    assert guess is not None
    assert not guess.is_sure


@pytest.mark.parametrize("place", [1, 2, 7])
def test_a_workspace_of_large_steps_is_no_tensor_of_all_pairs(place: int) -> None:
    """Where the ratio is large, almost any two requests would match by its square."""
    small = [160, 12_544, 6400, 1_254_400, 1600, 32_000, 80, 3200]
    large = [size * 500 for size in small]
    large.insert(place, 8_830_976)
    assert paired(small, large, ratio=500) == [*small[:place], None, *small[place:]]


@pytest.mark.parametrize("others", [(), (2**14,)])
def test_requests_that_grow_with_the_pairs_of_examples_grow_on_so(others: tuple[int, ...]) -> None:
    """Matrices of all pairs take 1 MiB at 4 examples: 4 n + n² / 16 MiB of 400 MiB.

    The larger step may make another request, which the smaller one does not make.
    """
    recordings = {
        n: recorded(n, *[n * n * MIB // 64] * 4, *(others if n == 20 else ())) for n in (4, 20)
    }
    guess = scaled_guess(recordings, 500 * MIB, AllocatorSettings())
    assert guess is not None
    assert 52 <= guess.size <= 54  # a line through both would end at 77
    assert not guess.is_sure


def test_the_first_step_of_a_failed_size_shows_where_requests_stop_growing() -> None:
    """A buffer grows by 3 MiB for each example up to 80 MiB, as those of reductions do."""

    def reduced(batch_size: int) -> Recording:
        return recorded(batch_size, min(3 * batch_size, 80) * MIB)

    recordings = {2: reduced(2), 20: reduced(20)}
    guess = scaled_guess(recordings, 500 * MIB, AllocatorSettings())
    assert guess is not None
    assert guess.size <= 57  # 7 MiB for each example of 400
    failed = reduced(90)
    recordings[90] = failed._replace(steps=failed.steps[:1], ran_out=True)
    guess = scaled_guess(recordings, 500 * MIB, AllocatorSettings())
    assert guess is not None
    assert 76 <= guess.size <= 81  # 4 MiB of 320
    # A failed step that made other requests, or none that ended, shows nothing.
    for steps in ((), recorded(90, 8 * MIB, 8 * MIB).steps[:1]):
        recordings[90] = failed._replace(steps=steps, ran_out=True)
        other = scaled_guess(recordings, 500 * MIB, AllocatorSettings())
        assert other is not None
        assert other.size <= 57


def test_a_size_that_failed_later_shows_requests_that_only_large_steps_make() -> None:
    """From 60 examples on, a kernel asks for one block more: 5 MiB for each example of 400."""

    def split(batch_size: int) -> Recording:
        return recorded(batch_size, *([MIB * batch_size] if batch_size >= 60 else []))

    recordings = {2: split(2), 20: split(20)}
    settings = AllocatorSettings()
    small = scaled_guess(recordings, 500 * MIB, settings)
    assert small is not None
    assert small.size >= 97
    failed = split(90)
    recordings[90] = failed._replace(steps=failed.steps[:2], ran_out=True)
    guess = scaled_guess(recordings, 500 * MIB, settings, failure=out_of_memory(90))
    assert guess is not None
    assert guess.is_sure
    assert 77 <= guess.size <= 80
    assert lasts(split(guess.size), 500 * MIB, settings)
    assert not lasts(split(guess.size + 4), 500 * MIB, settings)


def out_of_memory(size: int) -> Probe:
    return Probe(size, Outcome.OOM, steps=1, seconds=0.1)


def test_a_failure_that_is_not_of_memory_only_bounds_the_guess() -> None:
    """As where an operator takes no tensor of 2^31 elements."""
    recordings = {2: recorded(2), 20: recorded(20)}
    failure = Probe(60, Outcome.FAILED, steps=1, seconds=0.1)
    guess = scaled_guess(recordings, 500 * MIB, AllocatorSettings(), failure=failure)
    assert guess is not None
    assert guess.size == 59


def test_recordings_by_which_a_size_that_ran_out_fits_tell_nothing() -> None:
    recordings = {2: recorded(2), 20: recorded(20)}
    assert (
        scaled_guess(recordings, 500 * MIB, AllocatorSettings(), failure=out_of_memory(60)) is None
    )
    guess = scaled_guess(recordings, 500 * MIB, AllocatorSettings(), failure=out_of_memory(102))
    assert guess is not None
    assert 97 <= guess.size <= 100


def test_a_small_size_may_fit_although_the_one_below_does_not() -> None:
    """16 examples leave room for 30 MiB in their block, which keep the next request out of it."""

    def cached(batch_size: int) -> Recording:
        """The first step leaves 2 MiB in each of three segments, so none is ever released."""
        growing = [18 * batch_size, 30]
        first = [282, ~1, 2, 280, 322, ~4, 2, 320, 62, ~7, 2, ~3, ~6, *growing, ~9, 320, ~10, ~11]
        later = [[*growing, ~n, 320, ~(n + 1), ~(n + 2)] for n in (12, 15)]
        steps = [[e * MIB if e > 0 else e for e in step] for step in (first, *later)]
        return Recording([100 * MIB], steps)

    budget, settings = 900 * MIB, AllocatorSettings()
    assert [n for n in range(12, 30) if lasts(cached(n), budget, settings)] == [12, 13, 14, 15, 17]
    guess = scaled_guess({2: cached(2), 5: cached(5)}, budget, settings)
    assert guess is not None
    assert guess.size == 17


def test_failures_after_the_first_step_move_the_guess_down_twice_as_far_each_time() -> None:
    """The requests grow as they should, so the answer is near: replays misjudge only the cache."""
    recordings = {2: recorded(2), 20: recorded(20)}
    for failed, size in ((90, 89), (88, 86), (80, 70)):
        failure = recorded(failed)
        recordings[failed] = failure._replace(steps=failure.steps[:1], ran_out=True)
        guess = scaled_guess(
            recordings, 500 * MIB, AllocatorSettings(), failure=out_of_memory(failed)
        )
        assert guess is not None
        assert guess.size == size


def test_a_guess_fits_for_as_long_as_its_confirmation_must_last() -> None:
    """The fourth step needs half as much again, and three show a steady peak."""

    def rising(batch_size: int) -> Recording:
        recording = recorded(batch_size)
        *steady, (first, second, *rest) = recording.steps
        return recording._replace(steps=[*steady, [first, 2 * second, *rest]])

    guess = scaled_guess({2: rising(2), 20: rising(20)}, 500 * MIB, AllocatorSettings())
    assert guess is not None
    assert 60 <= guess.size <= 66
    assert lasts(rising(guess.size), 500 * MIB, AllocatorSettings())
    assert (
        scaled_guess({2: rising(2), 20: rising(20)}, 500 * MIB, AllocatorSettings(), 3, 70) is None
    )


def test_expandable_segments_fit_steps_that_a_cache_of_fixed_segments_does_not() -> None:
    """Each step holds one block more than the last, so cached blocks fit none of its requests."""
    settings = AllocatorSettings(), AllocatorSettings(expandable_segments=True)

    def growing(batch_size: int) -> Recording:
        asked = [(30 + 7 * step) * MIB * batch_size // 10 for step in range(4)]
        return Recording([], [[size, ~step] for step, size in enumerate(asked)])

    recordings = {2: growing(2), 20: growing(20)}
    plain, expanding = (scaled_guess(recordings, 500 * MIB, each) for each in settings)
    assert plain is not None
    assert expanding is not None
    assert expanding.size > 1.2 * plain.size


def validated(recording: Recording, batch_mib: int, output_mib: int) -> Recording:
    """The same steps, then a validation. Its output is alive until the end of the next step."""
    first = 1 + 3 * len(recording.steps)
    step = [event if event >= 0 else event - 14 for event in recording.steps[0]]
    validation = [batch_mib * MIB, output_mib * MIB, ~first, *step, ~(first + 1)]
    return recording._replace(validations=[validation])


@pytest.mark.parametrize(("output_mib", "most"), [(0, 100), (200, 50)])
def test_the_largest_size_leaves_room_for_a_validation_and_the_step_after_it(
    output_mib: int, most: int
) -> None:
    """An example takes 4 MiB of the 400 MiB beside the weights."""
    recordings = {n: validated(recorded(n), 8, output_mib) for n in (2, 20)}
    guess = scaled_guess(recordings, 500 * MIB, AllocatorSettings())
    assert guess is not None
    assert guess.is_sure
    assert 0.95 * most <= guess.size <= most
    assert lasts(validated(recorded(50), 8, output_mib), 520 * MIB, AllocatorSettings())
    assert lasts(recorded(60), 500 * MIB, AllocatorSettings())
    kept = validated(recorded(60), 8, output_mib)
    assert lasts(kept, 500 * MIB, AllocatorSettings()) is (most > 60)


def test_one_recording_or_one_that_does_not_grow_tells_nothing() -> None:
    assert scaled_guess({20: recorded(20)}, 500 * MIB, AllocatorSettings()) is None
    assert scaled_guess({2: recorded(2), 20: recorded(2)}, 500 * MIB, AllocatorSettings()) is None


def test_launches_without_a_validation_say_nothing_of_those_with_one() -> None:
    """A script may end before it, or another rank may need the most, which has none."""
    recordings = {n: validated(recorded(n), 8, 8) for n in (2, 20)}
    guessed = scaled_guess(recordings, 520 * MIB, AllocatorSettings())
    assert guessed is not None
    assert scaled_guess({**recordings, 10: recorded(10)}, 520 * MIB, AllocatorSettings()) == guessed


def test_a_loop_over_the_examples_makes_more_requests() -> None:
    """Beside a batch that grows, each example uses 12 MiB for a moment, and keeps 3 MiB."""

    def looped(batch_size: int) -> Recording:
        steps, number = [], 1  # the number of the batch's block, behind the one that is held
        for _ in range(4):
            end = number + 1 + 2 * batch_size
            uses = [(12 * MIB, ~place, 3 * MIB) for place in range(number + 1, end, 2)]
            kept = [number, *range(number + 2, end, 2)]
            steps.append([batch_size * MIB, *chain(*uses), *map(operator.inv, kept)])
            number = end
        return Recording([100 * MIB], steps)

    budget, settings = 2000 * MIB, AllocatorSettings()
    most = max(size for size in range(440, 500, 4) if lasts(looped(size), budget, settings))
    guess = scaled_guess({size: looped(size) for size in (2, 12, 24)}, budget, settings)

    assert guess
    assert 0.97 * most <= guess.size <= most
    assert not guess.is_sure


def test_requests_that_only_one_of_two_steps_makes_are_left_out() -> None:
    small, large = [10 * MIB, MIB, 5 * MIB], [20 * MIB, 70 * MIB, 2 * MIB, 10 * MIB]
    assert paired(small, large, ratio=2) == [10 * MIB, None, MIB, 5 * MIB]


def test_steps_that_all_make_the_same_requests_have_one_order() -> None:
    assert not [*in_other_orders(recorded(20))]


def routed(batch_size: int, shares: Sequence[int]) -> Recording:
    """Steps of two experts. Of 10 MiB of tokens for each example, the first gets these percent.

    The batch has 4 KiB for each example.
    """
    steps = []
    for number, share in enumerate(shares):
        batch, a, b, output = (4 * number + n for n in range(4))
        tokens = [share * batch_size * MIB // 10, (100 - share) * batch_size * MIB // 10]
        kept = [~(output - 4)] if number else []
        large = [*tokens, *kept, 20 * batch_size * MIB, ~a, ~b]
        steps.append([4096 * batch_size, *large, ~batch])
    return Recording([], steps)


@pytest.mark.parametrize(
    ("shares", "orders", "needed_mib"), [((50, 48, 51, 49), 6, 490), ((50,) * 4, 0, 302)]
)
def test_steps_that_differ_in_bytes_alone_must_fit_with_other_bytes_too(
    shares: Sequence[int], orders: int, needed_mib: int
) -> None:
    recording = routed(10, shares)
    assert len([*in_other_orders(recording)]) == orders
    assert lasts(recording, needed_mib * MIB, AllocatorSettings())
    assert not lasts(recording, (needed_mib - 4) * MIB, AllocatorSettings())
    guess = scaled_guess({2: routed(2, shares), 10: recording}, 5000 * MIB, AllocatorSettings())
    assert guess is not None
    assert lasts(routed(guess.size, shares), 5000 * MIB, AllocatorSettings())


def test_only_the_failure_of_steps_that_differ_is_foreseen() -> None:
    """Steps that are all alike fail by themselves, within one or two of them."""
    settings, budget_bytes = AllocatorSettings(), 5000 * MIB
    for shares, does in (((50, 48, 51, 49), True), ((50,) * 4, False)):
        end = max(n for n in range(50, 200) if lasts(routed(n, shares), budget_bytes, settings))
        recordings = {10: routed(10, shares), end: routed(end, shares)}
        assert foresees(recordings, end + 1, budget_bytes, settings) is does
        assert not foresees(recordings, end - 1, budget_bytes, settings)
        assert not foresees({end: recordings[end]}, end + 1, budget_bytes, settings)
