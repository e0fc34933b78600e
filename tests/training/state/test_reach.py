"""Objects that functions reach: through closures, globals, defaults, methods."""

from __future__ import annotations

import functools
import logging
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from batchfinder.training.state.reach import modules_reached, reachable

BY_GLOBAL = nn.Linear(2, 2)


class Loop:
    def __init__(self, model: nn.Module) -> None:
        self.parts = {"judges": [model]}

    def step(self, model: nn.Module, batch: Any) -> Tensor:
        return self._judged(model(batch))

    def _judged(self, output: Tensor) -> Tensor:
        judged: Tensor = self.parts["judges"][0](BY_GLOBAL(output))
        return judged.sum()


def by_closure(model: nn.Module) -> Any:
    return lambda _, batch: [model(part) for part in batch]


def by_a_function_that_it_calls(model: nn.Module) -> Any:
    inner = by_closure(model)

    def step(_: nn.Module, batch: Any) -> Any:
        return inner(_, batch)

    return step


def by_default(model: nn.Module) -> Any:
    def step(_: nn.Module, batch: Any, *, teacher: nn.Module = model) -> Any:
        return teacher(batch)

    return step


def by_partial(model: nn.Module) -> Any:
    return functools.partial(lambda teacher, _, batch: teacher(batch), model)


def by_namespace(model: nn.Module) -> Any:
    holder = SimpleNamespace(model=model)
    return lambda _, batch: holder.model(batch)


def by_optimizer_and_scheduler(model: nn.Module) -> Any:
    model.optimizer = torch.optim.SGD(model.parameters())  # type: ignore[assignment]
    scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 1)  # type: ignore[arg-type]
    return lambda _, batch: scheduler.step()


@pytest.mark.parametrize(
    "function_of",
    [by_closure, by_a_function_that_it_calls, by_default, by_partial, by_namespace],
)
def test_a_module_is_reached(function_of: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    found = [*reachable([function_of(module)])]
    assert module in found
    assert module[0].weight in {thing for thing in found if isinstance(thing, Tensor)}
    assert list(modules_reached([function_of(module)])) == [module]


def test_a_method_reaches_its_object_and_what_its_other_methods_read() -> None:
    module = nn.Linear(2, 2)
    assert set(modules_reached([Loop(module).step])) == {module, BY_GLOBAL}
    assert modules_reached([Loop(module).step])[BY_GLOBAL] == "BY_GLOBAL"


def test_a_scheduler_reaches_the_parameters_of_its_optimizer() -> None:
    module = nn.Linear(2, 2)
    step = by_optimizer_and_scheduler(module)
    assert any(thing is module.weight for thing in reachable([step]))


def test_data_and_objects_of_libraries_are_not_followed() -> None:
    data = TensorDataset(torch.zeros(4))
    logger = logging.getLogger("of a loop")
    logger.model = nn.Linear(2, 2)  # type: ignore[attr-defined]
    found = [*reachable([lambda _, batch: logger.info(data[0])])]
    assert not any(isinstance(thing, Tensor | nn.Module) for thing in found)


def test_functions_from_cython_are_not_followed() -> None:
    class Compiled:
        __module__: Any = property(lambda _: "numpy.random")  # it has no name, but a descriptor

        def __init__(self) -> None:
            self.module = nn.Linear(2, 2)

    zipf = Compiled()
    assert modules_reached([lambda: zipf]) == {}


def test_modules_are_named_by_variables() -> None:
    teacher, critics = nn.Linear(2, 2), [nn.Linear(2, 2)]

    def step(_: nn.Module, batch: Any) -> Any:
        return critics[0](teacher(batch))

    assert modules_reached([step]) == {teacher: "teacher", critics[0]: "Linear"}


def test_cycles_end() -> None:
    ring: list[Any] = []
    ring.append(ring)

    def step(_: nn.Module, batch: Any) -> Any:
        return step(_, ring)

    assert ring in [*reachable([step])]


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Slots:
    __slots__ = ("empty", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Static:
    module = nn.Linear(2, 2)

    @staticmethod
    def step(model: nn.Module, batch: Any) -> Any:
        return Static.module(batch)

    @classmethod
    def step_of_class(cls, model: nn.Module, batch: Any) -> Any:
        return cls.module(batch)


class Judge:
    @property
    def teacher(self) -> nn.Module:
        return BY_GLOBAL

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.teacher(batch)


def by_attribute_of_dict(model: nn.Module) -> Any:
    holder: Any = Attributes(model=model)
    return lambda _, batch: holder.model(batch)


def by_slot(model: nn.Module) -> Any:
    holder = Slots(model)
    return lambda _, batch: holder.module(batch)


def by_decorated_function(model: nn.Module) -> Any:
    @torch.no_grad()
    def teach(batch: Any) -> Any:
        return model(batch)

    return lambda _, batch: teach(batch)


def by_cached_function(model: nn.Module) -> Any:
    @functools.cache
    def teacher() -> Any:
        return model

    return lambda _, batch: teacher()(batch)


def by_hook(model: nn.Module) -> Any:
    weight = torch.zeros(2, requires_grad=True)
    weight.register_hook(lambda grad: model(grad))  # type: ignore[no-untyped-call]
    return lambda _, batch: weight.sum()


@pytest.mark.parametrize(
    "function_of",
    [by_attribute_of_dict, by_slot, by_decorated_function, by_cached_function, by_hook],
)
def test_a_module_is_reached_through_its_owners(function_of: Any) -> None:
    module = nn.Linear(2, 2)
    assert list(modules_reached([function_of(module)])) == [module]


def test_classes_and_properties_are_followed() -> None:
    assert list(modules_reached([Static.step])) == [Static.module]
    assert list(modules_reached([Static.step_of_class])) == [Static.module]
    assert list(modules_reached([Judge()])) == [BY_GLOBAL]


def test_names_in_a_users_module_are_followed() -> None:
    other = ModuleType("other")
    exec("teacher = unused = None\ndef teach(batch): return teacher(batch)", vars(other))
    vars(other).update(teacher=nn.Linear(2, 2), unused=nn.Linear(2, 2))
    found = modules_reached([lambda _, batch: other.teach(batch)])
    assert found == {vars(other)["teacher"]: "teacher"}


def test_a_million_numbers_cost_little() -> None:
    numbers = list(range(10**6))
    assert len([*reachable([lambda _, batch: numbers])]) < 100
