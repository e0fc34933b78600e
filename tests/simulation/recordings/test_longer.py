from __future__ import annotations

import math
from typing import Any

import pytest

from batchfinder.probing.devices.allocator.caching import AllocatorSettings, CachingAllocator
from batchfinder.probing.devices.allocator.expandable import allocator_of
from batchfinder.probing.devices.allocator.recorded import Replay
from batchfinder.probing.devices.allocator.recorded_step import only_large
from batchfinder.probing.place import AtPlace, Place
from batchfinder.results.probe import Outcome, Probe
from batchfinder.search.prober import Recording
from batchfinder.simulation.recordings import lasting
from batchfinder.simulation.recordings.guess import head_start_of
from batchfinder.simulation.recordings.lasting import (
    LASTING_STEPS,
    bytes_to_last,
    failing_variant,
    in_other_orders,
    lasts,
)
from batchfinder.simulation.recordings.longer import ORDERS_ROOM, LongerRecordings
from batchfinder.units import MIB


def of_lengths(*tokens: int) -> Recording:
    """Steps of texts: three activations, two of them alive at once. The output is kept."""
    steps, count = list[list[int]](), 1
    for number, n in enumerate(tokens):
        kept = [~(count - 1)] if number else []
        a, b, c = count, count + 1, count + 2
        steps.append([n * MIB, 2 * n * MIB, ~a, 3 * n * MIB, ~b, ~c, *kept, n * MIB])
        count += 4
    return Recording([50 * MIB], steps, batches_vary=True)


def test_batches_of_varying_length_are_replayed_at_other_lengths_too() -> None:
    recording = of_lengths(100, 90, 96, 90, 96)
    largest = {order.steps[number][0] for order in in_other_orders(recording) for number in (3, 9)}
    assert len(largest) > 5
    assert 84 * MIB <= min(largest) < 90 * MIB < max(largest) <= 96 * MIB
    assert not [*in_other_orders(recording._replace(batches_vary=False))]


@pytest.mark.parametrize("batches_vary", [True, False])
def test_a_size_whose_other_lengths_would_not_fit_does_not_last(batches_vary: bool) -> None:
    """The recorded lengths leave free blocks that fit each other, and no others."""
    recording = of_lengths(100, 90, 96, 90, 96)._replace(batches_vary=batches_vary)
    assert lasts(recording, 850 * MIB, AllocatorSettings()) is not batches_vary
    assert lasts(recording, 1000 * MIB, AllocatorSettings())


def test_several_processes_find_the_same_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    recording, settings = of_lengths(100, 90, 96, 90, 96), AllocatorSettings()
    budgets = [budget * MIB for budget in range(700, 1020, 40)]
    found = [failing_variant(recording, budget, settings) for budget in budgets]
    assert found[0] == 0 < max(each for each in found if each)
    assert found[-1] is None
    monkeypatch.setattr(lasting, "WORTH_PROCESSES", 0)
    assert [failing_variant(recording, budget, settings) for budget in budgets] == found


def test_the_largest_size_of_varying_lengths_is_guessed_from_a_small_one() -> None:
    recordings = {10: of_lengths(100, 90, 96, 90, 96)}
    longer = LongerRecordings(recordings, 5000 * MIB, AllocatorSettings())
    guess = longer.guess()
    assert guess is not None

    def at(size: int) -> Recording:
        return of_lengths(*(tokens * size // 10 for tokens in (100, 90, 96, 90, 96)))

    sizes = {n: at(n) for n in range(10, 200)}
    end = max(filter(LongerRecordings(sizes, 5000 * MIB, AllocatorSettings()).last, sizes))
    assert 0.9 * end <= guess.size <= 1.1 * end
    recordings |= {end: at(end), 2 * end: at(2 * end)}
    assert [longer.last(size) for size in (10, end, 2 * end, 3 * end)] == [True, True, False, True]


def in_pieces(batch_size: int) -> Recording:
    """Steps whose loss takes at most 300 MiB of logits at a time, of 100 for each example."""
    steps, count = list[list[int]](), 0
    for percent in (100, 97, 94, 97, 100):
        ids, hidden = 4096 * percent * batch_size, percent * batch_size * MIB // 10
        pieces = [MIB * min(300, percent * batch_size - 300 * i) for i in range(4)]
        pieces = [piece for piece in pieces if piece > 0]
        logits = [each for i, piece in enumerate(pieces) for each in (piece, ~(count + 2 + i))]
        steps.append([ids, hidden, *logits, ~count, ~(count + 1)])
        count += 2 + len(pieces)
    return Recording([], steps, batches_vary=True)


def test_pieces_of_a_loss_do_not_grow_with_the_batch() -> None:
    """A batch of 2 is smaller than a piece, so only larger ones show how large one is."""
    recordings = {size: in_pieces(size) for size in (2, 20, 60)}
    settings, budget_bytes = AllocatorSettings(), 5000 * MIB
    guess = LongerRecordings(recordings, budget_bytes, settings).guess()
    sizes = {n: in_pieces(n) for n in range(60, 600, 4)}
    end = max(filter(LongerRecordings(sizes, budget_bytes, settings).last, sizes))
    assert guess is not None
    assert 0.95 * end <= guess.size <= 1.05 * end


def at_size(size: int, eval_mib: int = 0) -> Recording:
    """Steps of ``size`` hundredths of texts of 100 tokens, and a validation of fixed batches."""
    recording = of_lengths(*(tokens * size // 100 for tokens in (100, 90, 96, 90, 96)))
    count = 1 + 4 * len(recording.steps)
    return recording._replace(validations=[[eval_mib * MIB, ~count]] * bool(eval_mib))


def test_the_batches_of_a_validation_do_not_grow_with_those_of_the_training() -> None:
    settings, budget_bytes = AllocatorSettings(), 5000 * MIB
    recordings = {size: at_size(size, eval_mib=500) for size in (20, 60, 160)}
    guess = LongerRecordings(recordings, budget_bytes, settings).guess()
    sizes = {n: at_size(n, eval_mib=500) for n in range(400, 700, 10)}
    end = max(filter(LongerRecordings(sizes, budget_bytes, settings).last, sizes))
    assert guess is not None
    assert 0.9 * end <= guess.size <= 1.1 * end


def gathering(size: int) -> Recording:
    """Steps, and validations that concatenate each batch's results to those before it."""
    recording = at_size(size)
    first = 1 + 4 * len(recording.steps)
    grown = [event for i in range(1, 17) for event in (63 * i * MIB, ~(first + i - 1))]
    later = [event if event >= 0 else event - 17 for event in grown]
    # What a batch has gathered is released after the next one has been added to it.
    validations = [[50 * MIB, *grown, ~(first + 16)], [50 * MIB, *later, ~(first + 33)]]
    return recording._replace(validations=validations)


@pytest.mark.parametrize(("budget_mib", "does"), [(5000, True), (2000, False)])
def test_validations_may_flush_the_cache_but_not_run_out_of_memory(
    budget_mib: int, does: bool
) -> None:
    """Blocks of all their sizes take 8600 MiB, and the largest two that exist together 1953."""
    longer = LongerRecordings({10: gathering(10)}, budget_mib * MIB, AllocatorSettings())
    assert longer.last(10) is does


def test_a_guess_leaves_memory_for_validations_that_flush_the_cache() -> None:
    settings, budget_bytes = AllocatorSettings(), 5000 * MIB
    guess = LongerRecordings({100: gathering(100)}, budget_bytes, settings).guess()
    sizes = {n: gathering(n) for n in range(400, 700, 10)}
    end = max(filter(LongerRecordings(sizes, budget_bytes, settings).last, sizes))
    assert guess is not None
    assert 0.9 * end <= guess.size <= 1.1 * end


def test_a_guess_that_a_larger_size_has_beaten_does_not_count() -> None:
    """Where requests grow less than in proportion, as of a loss that is computed in pieces."""
    settings, budget_bytes = AllocatorSettings(), 2000 * MIB
    beaten = LongerRecordings({150: at_size(150)}, budget_bytes, settings).guess()
    assert beaten is not None
    recordings = {150: at_size(150), beaten.size: at_size(160)}
    longer = LongerRecordings(recordings, budget_bytes, settings)
    guess = longer.guess()
    assert guess is not None
    assert guess.size > beaten.size
    assert longer.guess(Probe(beaten.size, Outcome.OOM, steps=1, seconds=0.1)) == beaten


def test_a_first_step_that_should_have_fitted_refutes_the_guess() -> None:
    """As where texts are joined, and the mask of them all grows with the square of the batch."""
    recordings = {10: of_lengths(100, 90, 96, 90, 96)}
    guess = LongerRecordings(recordings, 5000 * MIB, AllocatorSettings()).guess()
    assert guess is not None
    in_its_first_step = Recording([50 * MIB], [], batches_vary=True, ran_out=True)
    for size, is_refuted in ((guess.size, True), (3 * guess.size, False)):
        failed = {**recordings, size: in_its_first_step}
        longer = LongerRecordings(failed, 5000 * MIB, AllocatorSettings())
        assert longer.guess(Probe(size, Outcome.OOM, steps=1, seconds=0.1)) == (
            None if is_refuted else guess
        )


def test_a_failure_that_is_not_of_memory_does_not_refute_the_guess() -> None:
    recordings = {10: of_lengths(100, 90, 96, 90, 96)}
    guess = LongerRecordings(recordings, 5000 * MIB, AllocatorSettings()).guess()
    assert guess is not None
    size = guess.size - 1
    recordings[size] = Recording([50 * MIB], [], batches_vary=True, ran_out=True)
    longer = LongerRecordings(recordings, 5000 * MIB, AllocatorSettings())
    assert longer.guess(Probe(size, Outcome.FAILED, steps=1, seconds=0.1)) == guess


def test_varying_lengths_are_guessed_by_the_steps_before_a_failure_too() -> None:
    """Each large recording has its own lengths: the smallest guess counts."""
    lengths = {100: (100, 90, 96, 90, 96), 80: (80, 60, 70, 66)}
    small = {10: of_lengths(10, 9, 9, 10, 9)}
    failed = {size: of_lengths(*each)._replace(ran_out=True) for size, each in lengths.items()}
    guesses = {}
    for size, each in failed.items():
        longer = LongerRecordings({**small, size: each}, 700 * MIB, AllocatorSettings())
        guess = longer.guess()
        assert guess is not None
        guesses[size] = guess.size
    assert guesses[80] != guesses[100]
    longer = LongerRecordings({**small, **failed}, 700 * MIB, AllocatorSettings())
    guess = longer.guess()
    assert guess is not None
    assert guess.size == min(guesses.values())


def test_the_failure_just_above_varying_lengths_is_foreseen() -> None:
    def at(size: int) -> Recording:
        return of_lengths(*(tokens * size // 100 for tokens in (100, 90, 96, 90, 96)))

    sizes = range(900, 100, -1)
    end = next(n for n in sizes if lasts(at(n), 5000 * MIB, AllocatorSettings()))
    longer = LongerRecordings({10: at(10), end: at(end)}, 5000 * MIB, AllocatorSettings())
    foreseen = [size for size in range(11, 2 * end) if longer.foresee(size)]
    assert end < foreseen[0] <= end + 10
    assert foreseen == [*range(foreseen[0], foreseen[-1] + 1)]
    assert end * 1.02 < foreseen[-1] <= end * 1.03  # farther above, a size has to run


def with_last_pieces(size: int) -> Recording:
    """Steps whose loss takes 300 MiB of logits at a time. The last piece takes the rest."""
    steps, count = list[list[int]](), 0
    for percent in (100, 55, 72, 61, 83, 47, 91):
        logits = 100 * size * percent // 100
        pieces = [300] * (logits // 300) + [logits % 300] * (logits % 300 > 0)
        steps.append([percent * size * MIB // 100])
        for i, piece in enumerate(pieces):
            both = [~(count + 1 + 2 * i), ~(count + 2 + 2 * i)]
            steps[-1] += [piece * MIB, piece * MIB // 2, *both]
        steps[-1].append(~count)
        count += 1 + 2 * len(pieces)
    return Recording([], steps, batches_vary=True)


def test_no_failure_is_foreseen_far_from_the_limit() -> None:
    """If the last piece of each loss grew beyond the others, it would fit no block of theirs."""
    longer = LongerRecordings(
        {26: with_last_pieces(26), 53: with_last_pieces(53)}, 1000 * MIB, AllocatorSettings()
    )
    assert lasts(with_last_pieces(54), 1000 * MIB, AllocatorSettings())
    assert not longer.foresee(54)


@pytest.mark.parametrize("size", [13, 31, 53])
def test_a_loss_with_last_pieces_of_fixed_size_does_not_hold_a_guess_back(size: int) -> None:
    budget_bytes = 1200 * MIB
    guess = LongerRecordings(
        {7: with_last_pieces(7), size: with_last_pieces(size)}, budget_bytes, AllocatorSettings()
    ).guess()
    sizes = {n: with_last_pieces(n) for n in range(60, 900, 40)}
    end = max(filter(LongerRecordings(sizes, budget_bytes, AllocatorSettings()).last, sizes))
    assert guess is not None
    assert 0.9 * end <= guess.size <= 1.1 * end


def test_replays_have_the_budget_that_the_first_steps_have_left() -> None:
    """Libraries and kernels use memory outside the allocator once a step has run."""
    prober: Any = AtPlace()
    prober.settle(Place("cuda:0 Paper", 5500 * MIB, 0, 5000 * MIB, True, {}, batches_vary=True))
    prober.recordings = {10: of_lengths(100, 90, 96, 90, 96)}
    head_start = head_start_of(prober, 3)
    before = head_start.replay and head_start.replay(None)
    prober.lower_budget(4500 * MIB)
    after = head_start.replay and head_start.replay(None)
    assert before is not None
    assert after is not None
    assert 0.85 < after.size / before.size < 0.95


@pytest.mark.parametrize("size", [13, 31, 53])
def test_a_guess_that_was_not_large_enough_goes_on_from_there(size: int) -> None:
    def longer() -> LongerRecordings:
        recordings = {7: with_last_pieces(7), size: with_last_pieces(size)}
        return LongerRecordings(recordings, 1200 * MIB, AllocatorSettings())

    guess = longer().guess_from(size)
    assert guess is not None
    asked_again = longer()
    assert asked_again.guess_from(size, 2 * guess.size) is None
    assert asked_again.guess_from(size, guess.size + 1) is None
    assert asked_again.guess_from(size, guess.size) == guess
    assert asked_again.guess_from(size) == guess


def test_nothing_is_guessed_of_varying_lengths_without_a_recording() -> None:
    longer = LongerRecordings({}, 5000 * MIB, AllocatorSettings())
    assert longer.guess() is None
    assert longer.last(10)


def texts(*tokens: int) -> Recording:
    """Steps of texts: the layers' activations are released in turn. Output and loss are kept."""
    steps, count = list[list[int]](), 1
    for number, n in enumerate(tokens):
        kept = [~(count - 2), ~(count - 1)] if number else []
        first, second, *rest, sixth = [n * tenths * MIB // 10 for tenths in (3, 8, 5, 13, 7, 4)]
        a, b, c, d, e, f = range(count, count + 6)
        early = [first, second, rest[0], ~b, *rest[1:], ~a, sixth, ~e, ~c, ~d, ~f]
        steps.append([*early, *kept, n * MIB, 512])
        count += 8
    return Recording([50 * MIB], steps, batches_vary=True)


def test_steps_that_flush_the_cache_for_longer_batches_go_on() -> None:
    """Without a limit, the blocks of all lengths take 718 MiB."""
    recording, settings = texts(128, 100, 64, 90, 110), AllocatorSettings()
    assert max(bytes_to_last(each, settings) for each in in_other_orders(recording)) > 700 * MIB
    for budget_mib, does in ((540, False), (600, True)):
        assert LongerRecordings({10: recording}, budget_mib * MIB, settings).last(10) is does


def test_a_size_whose_steps_flush_the_cache_again_and_again_does_not_last() -> None:
    """Under expandable segments each longer batch is mapped where the one before was: it fits."""
    recording = of_lengths(100, 90, 96, 90, 96)
    settings = AllocatorSettings(expandable_segments=True)
    flushes = [
        sum(count for _, count in Replay(order, allocator_of(780 * MIB, settings)).steps(30))
        for order in in_other_orders(recording)
    ]
    assert min(flushes) > 6
    for budget_mib, does in ((800, False), (1000, True)):
        assert LongerRecordings({10: recording}, budget_mib * MIB, settings).last(10) is does


def test_the_small_pool_is_replayed_once() -> None:
    """Steps without their small requests need as much less in every order."""
    recording, settings = texts(128, 100, 64, 90, 110), AllocatorSettings()
    large = only_large(recording)
    assert all(event < 0 or event > MIB for step in large.steps for event in step)
    less = {
        bytes_to_last(each, settings) - bytes_to_last(other, settings)
        for each, other in zip(in_other_orders(recording), in_other_orders(large), strict=True)
    }
    assert less == {2 * MIB}


def optimized(*tokens: int) -> Recording:
    """Steps of a layer. The first makes states of 12 MiB, which settle in the layer's memory."""
    steps, count = list[list[int]](), 1
    for number, n in enumerate(tokens):
        states = [] if number else [12 * MIB] * 4
        layer = [6 * n * MIB, n * MIB // 2, ~(count + 2), ~(count + 1)]
        steps.append([4096 * n, *layer, *states, ~count])
        count += 3 + len(states)
    return Recording([12 * MIB], steps, batches_vary=True)


@pytest.mark.parametrize("budget_mib", [1000, 1300])
def test_a_training_may_begin_with_a_shorter_batch_than_the_longest(budget_mib: int) -> None:
    """Its segments are too small for longer ones, and the states keep one of them."""
    settings, budget_bytes = AllocatorSettings(), budget_mib * MIB
    varying, equal = optimized(100, 88, 94, 91, 100), optimized(*[100] * 5)
    longest_first = Replay(varying, CachingAllocator(budget_bytes, settings))
    assert [flushes for _, flushes in longest_first.steps(LASTING_STEPS)] == [0] * LASTING_STEPS
    assert lasts(varying, budget_bytes, settings) is (budget_mib == 1300)
    assert lasts(equal, budget_bytes, settings)


def test_replays_of_many_orders_leave_room_for_others() -> None:
    recording, settings = optimized(100, 88, 94, 91, 100), AllocatorSettings()
    budgets = range(1000 * MIB, 1300 * MIB, MIB)
    least = next(each for each in budgets if failing_variant(recording, each, settings) is None)
    for budget_bytes, does in ((least, False), (math.ceil(least / (1 - ORDERS_ROOM)), True)):
        assert LongerRecordings({10: recording}, budget_bytes, settings).last(10) is does
