"""Copies of functions and of what they hold have nothing in common with the originals."""

from __future__ import annotations

import functools
import logging
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from batchfinder.simulation.copies import copied

COUNTS = {"steps": 0}
Pair = namedtuple("Pair", "model optimizer")


def count() -> int:
    COUNTS["steps"] += 1
    return COUNTS["steps"]


class Loop:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=2)
        self.logger = logging.getLogger("of a loop")
        self.steps = 0

    def step(self, _: nn.Module, batch: Tensor) -> None:
        self.steps += 1

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.model(batch).square().mean()
            torch.autograd.backward(loss)
            return loss

        self.optimizer.step(closure)


def test_globals_and_functions_that_are_called_come_along() -> None:
    twin: Any = copied(lambda: count() + count(), {})
    assert twin() == 3
    assert COUNTS == {"steps": 0}


def test_a_method_trains_the_copy_of_its_object() -> None:
    model = nn.Linear(3, 3)
    loop = Loop(model)
    before = model.weight.detach().clone()

    copies: Any = copied((model, loop.step), {})
    twin_model, step = copies
    step(twin_model, torch.randn(4, 3))

    assert not torch.equal(twin_model.weight, before)
    assert torch.equal(model.weight, before)
    assert (loop.steps, step.__self__.steps) == (0, 1)
    assert loop.optimizer.state == {}
    assert step.__self__.logger is loop.logger
    assert loop.optimizer.defaults.keys() == torch.optim.LBFGS([model.weight]).defaults.keys()


def test_a_scheduler_knows_the_copy_of_its_optimizer(recwarn: Any) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1)
    before = model.weight.detach().clone()

    def step(model: nn.Module, batch: Tensor) -> None:
        torch.autograd.backward(model(batch).sum())
        optimizer.step()
        scheduler.step()

    twin_model, twin = copied((model, step), {})
    twin(twin_model, torch.ones(1, 3))

    assert not torch.equal(twin_model.weight, before)
    assert torch.equal(model.weight, before)
    assert not hasattr(optimizer, "_opt_called")
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert [str(warning.message) for warning in recwarn] == []


def test_tied_things_stay_tied() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    things = SimpleNamespace(pair=Pair(model, optimizer), all={"it": [model], "cell": {model}})
    step = functools.partial(lambda held, model: held.pair.model is model, things)

    twin_model, twin, twin_step = copied((model, things, step), {})

    assert twin_model is not model
    assert twin.pair.model is twin.all["it"][0] is twin_model
    assert twin.all["cell"] == {twin_model}
    assert twin.pair.optimizer.param_groups[0]["params"][0] is twin_model.weight
    assert twin_step(twin_model)
    assert step(model)


def test_a_closure_that_is_written_to_is_shared_by_the_copies_alone() -> None:
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    copies: Any = copied((step, lambda: steps), {})
    twin_step, twin_count = copies
    twin_step()
    assert steps == 0
    assert twin_count() == 1
