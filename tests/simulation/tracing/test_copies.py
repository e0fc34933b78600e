"""Copies of functions share nothing with the originals."""

from __future__ import annotations

import copy
import functools
import logging
import random
from collections import defaultdict, deque, namedtuple
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from batchfinder import BatchFinderWarning, estimate_max_batch, estimate_peak_memory
from batchfinder.simulation.tracing.copies import copied

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


def test_globals_and_called_functions_are_copied() -> None:
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


def test_a_copied_scheduler_uses_the_copied_optimizer(recwarn: Any) -> None:
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


def test_copies_share_a_written_closure_only_with_copies() -> None:
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    copies: Any = copied((step, lambda: steps), {})
    twin_step, twin_count = copies
    twin_step()
    assert steps == 0
    assert twin_count() == 1


TEACHER = nn.Linear(3, 3)


class Attributes(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Slots:
    __slots__ = ("empty", "steps")

    def __init__(self) -> None:
        self.steps = 0


class Pupil:
    history: ClassVar[list[Any]] = []

    def __call__(self, batch: Tensor) -> Tensor:
        self.history.append(batch)
        output: Tensor = self.taught(batch) + self.teacher(batch)
        return output

    @property
    def teacher(self) -> nn.Module:
        return TEACHER

    @staticmethod
    def taught(batch: Tensor) -> Tensor:
        output: Tensor = TEACHER(batch)
        return output


class LatePupil(Pupil):
    def __call__(self, batch: Tensor) -> Tensor:
        return super().__call__(batch) * 2


@pytest.mark.parametrize("kind", [Pupil, LatePupil])
def test_methods_and_properties_reach_copies(kind: type[Pupil]) -> None:
    twin: Any = copied(kind(), {})
    assert isinstance(twin, kind)
    loss = twin.taught(torch.ones(1, 3)) + twin.teacher(torch.ones(1, 3))
    torch.autograd.backward(loss.sum())
    assert twin.teacher.weight.grad is not None
    assert TEACHER.weight.grad is None


def test_a_call_reaches_copies() -> None:
    twin: Any = copied(Pupil(), {})
    torch.autograd.backward(twin(torch.ones(1, 3)).sum())
    assert TEACHER.weight.grad is None
    assert Pupil.history == []
    assert len(twin.history) == 1


def test_super_calls_the_base_method_once() -> None:
    torch.testing.assert_close(
        copied(LatePupil(), {})(torch.ones(1, 3)), LatePupil()(torch.ones(1, 3))
    )
    Pupil.history.clear()


def test_functions_wrapped_by_a_library_reach_copies() -> None:
    average = nn.Linear(3, 3)
    before = average.weight.detach().clone()

    @torch.no_grad()
    def update() -> None:
        average.weight.zero_()

    copied(lambda: update(), {})()
    assert torch.equal(average.weight, before)


def test_a_copied_hook_writes_to_the_copied_state() -> None:
    model, features = nn.Linear(3, 3), dict[str, Tensor]()
    model.register_forward_hook(lambda module, args, output: features.update(last=output))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        model(batch)
        return features["last"]

    twin_model, twin = copied((model, step), {})
    assert twin(twin_model, torch.ones(1, 3)).shape == (1, 3)
    assert features == {}


def test_derived_containers_and_slots_are_copied() -> None:
    holder, slots = Attributes(steps=[0]), Slots()
    queue: deque[Any] = deque([1, 2], maxlen=2)
    counts = defaultdict(int, {"a": 1})
    twins: Any = copied((holder, slots, queue, counts), {})
    twins[0].steps.append(1)
    twins[1].steps = twins[1].empty = 1
    twins[2].append(3)
    twins[3]["b"] += 1
    assert (holder, slots.steps, queue, counts) == ({"steps": [0]}, 0, deque([1, 2]), {"a": 1})
    assert not hasattr(slots, "empty")
    assert twins[2] == deque([2, 3])


def test_the_named_variables_of_a_users_module_are_copied() -> None:
    other = ModuleType("other")
    exec("steps = 0\ndef count():\n    global steps\n    steps += 1", vars(other))

    def step() -> Any:
        other.count()
        return other.steps

    assert copied(step, {})() == 1
    assert vars(other)["steps"] == 0


def test_random_generators_are_copied() -> None:
    own, numbers = random.Random(1), np.random.default_rng(1)
    states = own.getstate(), str(numbers.bit_generator.state)
    copied(lambda: (own.random(), numbers.random()), {})()
    assert states == (own.getstate(), str(numbers.bit_generator.state))


@torch.library.custom_op("batchfinder_test::doubled", mutates_args=())
def doubled(rows: Tensor) -> Tensor:
    return rows * 2


@doubled.register_fake
def _(rows: Tensor) -> Tensor:
    return torch.empty_like(rows)


doubled.register_autograd(lambda _, gradient: gradient * 2)


class Doubling(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.operators = {"double": doubled}

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.operators["double"](super().forward(rows))
        return output


def test_a_module_may_hold_custom_operators() -> None:
    with pytest.warns(BatchFinderWarning, match="batchfinder_test:: has custom operators") as told:
        estimate = estimate_max_batch(Doubling(), torch.randn(2, 4), gpu="t4", max_batch_size=8)
    assert estimate.batch_size == 8
    assert sum("custom operators" in str(warning.message) for warning in told) == 1


def test_a_step_may_copy_its_model_and_literals() -> None:
    model, sample = nn.Linear(2048, 2048), torch.randn(2, 2048)

    def step(model: nn.Module, batch: Tensor, copying: bool) -> Tensor:
        loss: Tensor = model(batch).mean()
        if copying:
            seen = copy.deepcopy({"tokens": torch.tensor(2)})
            loss = loss + (copy.deepcopy(model)(batch) * seen["tokens"]).mean()
        return loss

    alone, beside = (
        estimate_peak_memory(
            model,
            sample,
            batch_size=2,
            optimizer="sgd",
            step=functools.partial(step, copying=copying),
            gpu="t4",
        )
        for copying in (False, True)
    )
    copied_bytes = 2048 * 2048 * 4  # its gradients may meet those of the model
    assert copied_bytes <= beside.peak_bytes - alone.peak_bytes <= 3 * copied_bytes
