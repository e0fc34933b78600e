from __future__ import annotations

import pytest

from batchfinder.simulation.trace.alignment import NotGeneralError, sort_deaths
from batchfinder.simulation.trace.repeats import Repeats
from batchfinder.simulation.trace.trace import Stage, Storage, Trace

PIXELS, TEXT, BUFFER, GRADIENT = "pixels", "text", "buffer", "gradient"


class Step:
    """Builds a trace."""

    def __init__(self, batch_size: int) -> None:
        self.trace = Trace(batch_size, steps=[0], stages=[(0, Stage.FORWARD)])

    def born(self, line: str, size: int, stage: Stage = Stage.FORWARD) -> int:
        index = len(self.trace.storages)
        if self.trace.stages[-1][1] is not stage:
            self.trace.stages.append((len(self.trace.events), stage))
        self.trace.storages.append(Storage(size, stage=stage, line=line))
        self.trace.events.append(index)
        return index

    def dies(self, index: int) -> None:
        self.trace.events.append(~index)


def images(batch_size: int, *, growing: bool = False) -> Trace:
    """Two windows of each image, each with a buffer that lives until the next one is there.

    Their gradients come in the opposite order.
    """
    step = Step(batch_size)
    weight = step.born("weight", 5000)
    outputs: list[int] = []
    buffer: int | None = None
    for number in range(batch_size):
        for window in (4000, 3000):
            outputs.append(step.born(PIXELS, window + 512 * number * growing))
            last, buffer = buffer, step.born(BUFFER, 600)
            if last is not None:
                step.dies(last)
    text = step.born(PIXELS, 7000 * batch_size)  # of the same kind as what is in the loop
    for output in reversed(outputs):
        gradient = step.born(GRADIENT, 900, Stage.BACKWARD)
        step.dies(output)
        step.dies(gradient)
    step.dies(text)
    assert buffer is not None
    step.dies(buffer)
    step.dies(weight)
    return sort_deaths(step.trace)


@pytest.mark.parametrize("batch_size", [4, 5, 8, 11, 40])
def test_a_loop_over_the_examples_has_as_many_passes_as_the_batch_has_examples(
    batch_size: int,
) -> None:
    repeats = Repeats(images(4), images(8))

    assert repeats.at(batch_size) == images(batch_size)
    assert repeats.events_per_sample == len(images(9).events) - len(images(8).events)


def test_no_smaller_batch_than_the_smaller_one_is_known() -> None:
    with pytest.raises(NotGeneralError, match="batch size 2 is too small"):
        Repeats(images(4), images(8)).at(2)


def test_passes_that_differ_are_no_loop() -> None:
    with pytest.raises(NotGeneralError):
        Repeats(images(4, growing=True), images(8, growing=True))


def test_steps_that_do_different_things_are_no_loop() -> None:
    other = images(8)
    other.storages.append(Storage(100, line="only in a large batch"))
    other.events.append(len(other.storages) - 1)
    with pytest.raises(NotGeneralError, match="different things"):
        Repeats(images(4), other)


def test_a_step_without_a_loop_is_left_to_others() -> None:
    plain = [Trace(size, [Storage(size)], [0]) for size in (4, 8)]
    with pytest.raises(NotGeneralError, match="no loop"):
        Repeats(*plain)


def test_a_loop_needs_passes_to_compare() -> None:
    with pytest.raises(NotGeneralError, match="too few passes"):
        Repeats(images(2), images(3))
