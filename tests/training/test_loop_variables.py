"""A user's step keeps its variables, as a loop at module level does."""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchfinder import TrainingSetup
from batchfinder.training.loop_variables import LoopVariables
from batchfinder.training.step import TrainingStep


class Value:
    """A value that can be seen to live."""


def test_a_variable_lives_until_the_next_call_assigns_it() -> None:
    alive: list[list[bool]] = []
    made: list[weakref.ref[Value]] = []

    def step() -> None:
        alive.append([reference() is not None for reference in made])
        early = Value()
        alive.append([reference() is not None for reference in made])
        late = Value()
        alive.append([reference() is not None for reference in made])
        made[:] = [weakref.ref(early), weakref.ref(late)]

    variables = LoopVariables(step)
    variables()
    alive.clear()
    variables()
    # Each is released where the loop gives its variable another value.
    assert alive == [[True, True], [False, True], [False, False]]
    assert all(reference() is not None for reference in made)
    variables.values.clear()
    assert all(reference() is None for reference in made)


def test_nothing_is_kept_of_a_call_that_raised() -> None:
    made: list[weakref.ref[Value]] = []

    def step(fails: bool) -> None:
        value = Value()
        made[:] = [weakref.ref(value)]
        if fails:
            raise ValueError("no")

    variables = LoopVariables(step)
    variables(False)
    with pytest.raises(ValueError, match="no"):
        variables(True)
    assert variables.values == {}
    assert made[0]() is None


class Stepper:
    def __call__(self, number: int) -> int:
        doubled = 2 * number
        return doubled + number

    def method(self, number: int) -> int:
        return self(number)


def step_of(base: int, number: int) -> int:
    total = base + number
    return total + number


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (Stepper(), {"doubled": 6}),
        (Stepper().method, {}),  # its own variables, not those of what it calls
        (partial(step_of, 4), {"base": 4, "total": 7}),
        (abs, {}),
    ],
)
def test_any_callable_is_called(function: Any, kept: dict[str, int]) -> None:
    variables = LoopVariables(function)
    assert variables(3) == function(3)
    values = {name: value for name, value in variables.values.items() if name != "self"}
    assert values == ({"number": 3, **kept} if function is not abs else {})
    assert sys.gettrace() is None


def test_a_debugger_stays_in_charge() -> None:
    def trace(*_: Any) -> None:
        return None

    variables = LoopVariables(step_of)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert variables(1, 2) == 5
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert variables.values == {}


def test_a_training_step_keeps_the_variables_of_the_users_step_until_it_is_released() -> None:
    outputs: list[weakref.ref[Tensor]] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        output: Tensor = model(batch)
        outputs.append(weakref.ref(output))
        return output.mean()

    setup = TrainingSetup(nn.Linear(4, 2), torch.ones(2, 4), step=step)
    training = TrainingStep(setup, torch.device("cpu"))
    for _ in range(2):
        training.forward_backward(torch.ones(2, 4))
        training.optimizer_step()
    assert [output() is None for output in outputs] == [True, False]
    training.release()
    assert outputs[1]() is None
