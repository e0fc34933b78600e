from __future__ import annotations

from collections.abc import Sequence

import pytest

from batchfinder.probing.devices.allocator.caching import AllocatorSettings, CachingAllocator
from batchfinder.probing.devices.allocator.recorded import Replay
from batchfinder.probing.devices.allocator.recorded_step import only_large
from batchfinder.search.prober import Recording
from batchfinder.simulation.longer_recording import (
    LongerRecordings,
    bytes_to_last,
    in_other_orders,
    lasts,
    releasing_early,
)
from batchfinder.simulation.matched_requests import paired
from batchfinder.simulation.scaled_recording import foresees, scaled_guess
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


def test_requests_that_grow_with_the_pairs_of_examples_grow_on_so() -> None:
    """A matrix of all pairs takes 1 MiB at 4 examples: 4 n + n² / 16 MiB of 400 MiB."""
    recordings = {n: recorded(n, n * n * MIB // 16) for n in (4, 20)}
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
    guess = scaled_guess(recordings, 500 * MIB, settings, failed=90)
    assert guess is not None
    assert guess.is_sure
    assert 77 <= guess.size <= 80
    assert lasts(split(guess.size), 500 * MIB, settings)
    assert not lasts(split(guess.size + 4), 500 * MIB, settings)


def test_recordings_by_which_a_failed_size_fits_tell_nothing() -> None:
    recordings = {2: recorded(2), 20: recorded(20)}
    assert scaled_guess(recordings, 500 * MIB, AllocatorSettings(), failed=60) is None
    guess = scaled_guess(recordings, 500 * MIB, AllocatorSettings(), failed=102)
    assert guess is not None
    assert 97 <= guess.size <= 100


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


def test_requests_that_only_one_of_two_steps_makes_are_left_out() -> None:
    small, large = [10 * MIB, MIB, 5 * MIB], [20 * MIB, 70 * MIB, 2 * MIB, 10 * MIB]
    assert paired(small, large, ratio=2) == [10 * MIB, None, MIB, 5 * MIB]


@pytest.mark.parametrize(("budget_mib", "does"), [(1000, True), (300, False)])
def test_a_confirmation_that_would_run_out_later_does_not_last(budget_mib: int, does: bool) -> None:
    """Each step keeps 40 MiB: the four that were recorded fit into 300 MiB."""
    recording = Recording([], [[40 * MIB, 2 * MIB, ~(2 * i + 1)] for i in range(4)])
    assert lasts(recording, budget_mib * MIB, AllocatorSettings()) is does
    assert lasts(None, budget_mib * MIB, AllocatorSettings())


def test_a_stream_does_not_get_the_free_memory_of_another() -> None:
    """Two streams request 100 MiB, one after the other: a single stream would need it once."""
    steps = [[100 * MIB, ~(2 * i), 100 * MIB, ~(2 * i + 1)] for i in range(4)]
    assert lasts(Recording([], steps), 150 * MIB, AllocatorSettings())
    assert lasts(Recording([], steps, [0, 1] * 4), 250 * MIB, AllocatorSettings())
    late = [
        [100 * MIB, 100 * MIB, ~(3 * i), ~(3 * i + 1), 100 * MIB, ~(3 * i + 2)] for i in range(4)
    ]
    assert lasts(Recording([], late), 250 * MIB, AllocatorSettings())
    assert not lasts(Recording([], late, [0, 0, 1] * 4), 150 * MIB, AllocatorSettings())


def test_a_loop_may_release_the_old_batch_before_it_copies_the_next() -> None:
    recording = Recording([], [[10], [10, ~0, 20, ~2]])
    assert releasing_early(recording).steps == [[10], [~0, 10, 20, ~2]]


def test_steps_that_differ_are_replayed_in_other_orders() -> None:
    """Steps of a model that skips a layer at random; each keeps its output into the next one."""

    def step(number: int, layers: int) -> list[int]:
        first = 1 + sum(1 + count for count in depths[:number])
        kept = [~(first - depths[number - 1] - 1)] if number else []
        blocks = range(first + 1, first + 1 + layers)
        return [8 * MIB, *kept, *([100 * MIB] * layers), *(~block for block in blocks)]

    depths = [3, 2, 3, 3]
    recording = Recording([50 * MIB], [step(n, layers) for n, layers in enumerate(depths)])
    orders = [*in_other_orders(recording)]
    assert len({str(order.steps) for order in orders}) == len(orders) > 1
    for order in orders:
        allocator = CachingAllocator(500 * MIB, AllocatorSettings())
        assert sum(1 for _ in Replay(order, allocator).steps(len(order.steps))) == len(order.steps)
        assert allocator.allocated_bytes == 58 * MIB


def test_steps_that_all_make_the_same_requests_have_one_order() -> None:
    assert not [*in_other_orders(recorded(20))]


def epochs(kept_mib: int) -> Recording:
    """Epochs of a full batch and a smaller last one, which makes a request more."""
    steps, count = list[list[int]](), 0
    for batch_mib, more in [(100, 0), (100, 0), (60, 1), (100, 0), (60, 1)]:
        asked = [kept_mib * MIB, batch_mib * MIB, *([MIB] * more)]
        steps.append([*asked, *(~block for block in range(count + 1, count + len(asked)))])
        count += len(asked)
    return Recording([], steps)


def test_the_smaller_last_batch_of_an_epoch_costs_no_room() -> None:
    assert not [*in_other_orders(epochs(kept_mib=0))]
    assert lasts(epochs(kept_mib=0), 104 * MIB, AllocatorSettings())


def test_a_loss_that_some_steps_log_costs_no_room() -> None:
    """RN50 of OpenCLIP logs after its first step: 37 was answered where 41 trains."""
    recording = Recording([], [[MIB * 100, ~0], [MIB * 100, ~1, 4, ~2], [MIB * 100, ~3]])
    assert lasts(recording, 104 * MIB, AllocatorSettings())


def test_epochs_are_replayed_for_longer_than_they_were_recorded() -> None:
    """Each step keeps 20 MiB, which splits the space of a batch."""
    recording = epochs(kept_mib=20)
    allocator = CachingAllocator(300 * MIB, AllocatorSettings())
    assert len([*Replay(recording, allocator).steps(5)]) == 5
    assert not lasts(recording, 300 * MIB, AllocatorSettings())
    assert lasts(recording, 600 * MIB, AllocatorSettings())


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


def test_batches_between_the_last_of_an_epoch_and_the_others_are_not_expected() -> None:
    """PPO: minibatches of two sizes, and now and then a step that collects more data first."""
    steps, count = list[list[int]](), 0
    for asked in ((100,), (100,), (60,), (100, 2), (60,)):
        steps.append([*(n * MIB for n in asked), *(~(count + i) for i in range(len(asked)))])
        count += len(asked)
    orders = [*in_other_orders(Recording([], steps))]
    assert orders
    requested = {event // MIB for order in orders for step in order.steps for event in step}
    assert {size for size in requested if size >= 0} == {100, 60, 2}


@pytest.mark.parametrize(("budget_mib", "does"), [(700, True), (300, False)])
def test_more_validations_must_fit_than_were_recorded(budget_mib: int, does: bool) -> None:
    """Each validation leaves 40 MiB: two fit into 300 MiB, twelve do not."""
    steps = [[MIB, ~i] for i in range(4)]
    validations = [[40 * MIB, 2 * MIB, ~(5 + 2 * i)] for i in range(2)]
    recording = Recording([], steps, validations=validations)
    assert lasts(recording, budget_mib * MIB, AllocatorSettings()) is does


def test_the_largest_size_of_varying_lengths_is_guessed_from_a_small_one() -> None:
    recordings = {10: of_lengths(100, 90, 96, 90, 96)}
    longer = LongerRecordings(recordings, 5000 * MIB, AllocatorSettings())
    guess = longer.guess()
    assert guess is not None

    def at(size: int) -> Recording:
        return of_lengths(*(tokens * size // 10 for tokens in (100, 90, 96, 90, 96)))

    end = max(n for n in range(10, 200) if lasts(at(n), 5000 * MIB, AllocatorSettings()))
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
    end = max(n for n in range(60, 900, 4) if lasts(in_pieces(n), budget_bytes, settings))
    assert guess is not None
    assert 0.95 * end <= guess.size <= 1.05 * end


def test_varying_lengths_are_guessed_by_the_steps_before_a_failure_too() -> None:
    """Each large recording has its own lengths: the smallest guess counts."""
    lengths = {100: (100, 90, 96, 90, 96), 80: (80, 60, 70, 66)}
    small = {10: of_lengths(10, 9, 9, 10, 9)}
    guesses = {}
    for size, tokens in lengths.items():
        failed = of_lengths(*tokens)._replace(ran_out=True)
        longer = LongerRecordings({**small, size: failed}, 700 * MIB, AllocatorSettings())
        guess = longer.guess()
        assert guess is not None
        guesses[size] = guess.size
    assert guesses[80] != guesses[100]
    both = {size: of_lengths(*tokens) for size, tokens in lengths.items()}
    longer = LongerRecordings({**small, **both}, 700 * MIB, AllocatorSettings())
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


def test_where_the_order_of_lengths_counts_more_steps_must_last() -> None:
    """Thirty steps in other orders need more than the recorded ones, and 120 still more."""
    recording, settings = texts(128, 100, 64, 90, 110), AllocatorSettings()
    recorded_bytes = bytes_to_last(recording, settings)
    thirty, many = (
        max(bytes_to_last(each, settings) for each in in_other_orders(recording, steps))
        for steps in (30, 120)
    )
    assert recorded_bytes < thirty < many
    for budget_bytes, does in ((thirty, False), (many, True)):
        assert LongerRecordings({10: recording}, budget_bytes, settings).last(10) is does


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
