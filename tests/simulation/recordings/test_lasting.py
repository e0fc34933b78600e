from __future__ import annotations

from itertools import chain

import pytest

from batchfinder.probing.devices.allocator.caching import AllocatorSettings, CachingAllocator
from batchfinder.probing.devices.allocator.recorded import Replay
from batchfinder.search.prober import Recording
from batchfinder.simulation.recordings.lasting import (
    in_other_orders,
    lasts,
    limit_of,
    releasing_all,
    releasing_early,
)
from batchfinder.units import MIB


@pytest.mark.parametrize(("budget_mib", "does"), [(1000, True), (300, False)])
def test_a_confirmation_that_would_run_out_later_does_not_last(budget_mib: int, does: bool) -> None:
    """Each step keeps 40 MiB: the four that were recorded fit into 300 MiB."""
    recording = Recording([], [[40 * MIB, 2 * MIB, ~(2 * i + 1)] for i in range(4)])
    assert lasts(recording, budget_mib * MIB, AllocatorSettings()) is does
    assert lasts(None, budget_mib * MIB, AllocatorSettings())


@pytest.mark.parametrize(("budget_mib", "does"), [(600, True), (360, False)])
def test_equal_steps_may_not_flush_the_cache_for_ever(budget_mib: int, does: bool) -> None:
    """Each block lives for some more requests, and in 360 MiB the ninth step flushes the cache."""
    blocks = [(40, 6), (60, 7), (80, 5), (10, 2), (50, 7), (10, 7)]
    ends = [place + blocks[place % 6][1] for place in range(24)]
    events = [
        [*(~block for block in range(24) if ends[block] == place), blocks[place % 6][0] * MIB]
        for place in range(24)
    ]
    steps = [[*chain(*events[start : start + 6])] for start in range(0, 24, 6)]
    assert lasts(Recording([], steps), budget_mib * MIB, AllocatorSettings()) is does


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


def test_a_step_may_be_a_function_which_drops_its_variables_when_it_ends() -> None:
    """What was there before the first step, as a gradient, is no variable."""
    recording = Recording([5], [[30, 60, ~1, 50], [40, ~2, 20, ~0, ~4, ~3]])
    assert releasing_all(recording).steps == [[30, 60, ~1, 50], [~2, ~3, 40, 20, ~0, ~4]]


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


@pytest.mark.parametrize("recorded", [1, 2])
@pytest.mark.parametrize(("budget_mib", "does"), [(700, True), (300, False)])
def test_more_validations_must_fit_than_were_recorded(
    budget_mib: int, does: bool, recorded: int
) -> None:
    """Each validation leaves 40 MiB: two fit into 300 MiB, eleven do not. A script has one."""
    steps = [[MIB, ~i] for i in range(4)]
    validations = [[40 * MIB, 2 * MIB, ~(5 + 2 * i)] for i in range(recorded)]
    recording = Recording([], steps, validations=validations)
    assert lasts(recording, budget_mib * MIB, AllocatorSettings()) is does


def test_the_batch_of_the_step_before_a_validation_does_not_pile_up() -> None:
    """The step after the validation logs, so it makes two requests more than the one before."""
    steps = [[40 * MIB, 50 * MIB, ~1], [~0, 40 * MIB, 50 * MIB, ~3]]
    validations = [[~2, 30 * MIB, ~4, 512, 40 * MIB, 512, 50 * MIB, ~8]]
    recording = Recording([], steps, validations=validations)
    assert lasts(recording, 140 * MIB, AllocatorSettings())


def test_where_two_lengths_vary_neither_gets_longer_than_recorded() -> None:
    """Questions differ in length, and answers, whose request is the largest, do not."""
    questions = [100, 100, 97, 98, 99]
    steps = [
        [n * MIB, 2 * n * MIB, 300 * MIB, ~(3 * i), ~(3 * i + 1), ~(3 * i + 2)]
        for i, n in enumerate(questions)
    ]
    recording = Recording([], steps, batches_vary=True)
    orders = [*in_other_orders(recording)]
    asked = {order.steps[number][0] for order in orders for number in range(1, 9)}
    assert min(asked) < 98 * MIB
    assert max(asked) <= 100 * MIB
    for order in orders:  # blocks of a shorter first batch would be in the way
        longest_first = order._replace(steps=[recording.steps[0], *order.steps[1:]])
        assert len([*Replay(longest_first, CachingAllocator(600 * MIB)).steps(30)]) == 30


@pytest.mark.parametrize(("second_mib", "does"), [(100, True), (96, False)])
def test_states_that_a_second_optimizer_makes_in_the_second_step_cost_no_room(
    second_mib: int, does: bool
) -> None:
    """A step of a script ends with its first optimizer. Other requests of one input still count."""
    states, other = [5 * MIB, 5 * MIB], second_mib * MIB
    steps = [
        [200 * MIB, 100 * MIB, ~1, *states, ~0],
        [200 * MIB, other, ~5, *states, ~4],
        [200 * MIB, 100 * MIB, ~9, ~8],
    ]
    recording = Recording([], steps)
    assert lasts(recording, 410 * MIB, AllocatorSettings()) is does
    assert lasts(recording, 600 * MIB, AllocatorSettings())


def test_batches_that_python_frees_in_some_steps_only_are_no_leak() -> None:
    """A fastai script: its second step makes states, and its third frees the batches before it."""
    steps = [[100 * MIB], [100 * MIB, 20 * MIB, 20 * MIB], [100 * MIB, ~0, ~1], [100 * MIB]]
    assert lasts(Recording([], steps), 350 * MIB, AllocatorSettings())
    assert not lasts(Recording([], steps), 330 * MIB, AllocatorSettings())


@pytest.mark.parametrize("differ", [True, False])
def test_where_lengths_differ_the_budget_has_left_room_already(differ: bool) -> None:
    """The first and the largest request are the same in each step, and the others differ."""
    steps = [
        [8, 100 * MIB, n * MIB, ~(3 * i), ~(3 * i + 1), ~(3 * i + 2)]
        for i, n in enumerate((40, 40, 30, 20))
    ]
    recording = Recording([], steps, lengths_differ=differ)
    assert limit_of(recording, 1000) == (1000 if differ else 950)


@pytest.mark.parametrize("differ", [True, False])
def test_longer_batches_of_a_script_may_flush_the_cache(differ: bool) -> None:
    """The blocks of each batch are too small for the longer ones that follow."""
    steps = [[n * MIB, n * MIB, ~(2 * i), ~(2 * i + 1)] for i, n in enumerate(range(60, 180, 10))]
    recording = Recording([], steps, lengths_differ=differ)
    assert lasts(recording, 400 * MIB, AllocatorSettings()) is differ
    assert not lasts(recording, 300 * MIB, AllocatorSettings())
