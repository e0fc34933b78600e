from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from batchfinder.errors import StepError, UsageError
from batchfinder.training.optimizer import (
    find_optimizer,
    make_optimizer,
    optimizer_names,
    without_closure,
)


def parameters_of(optimizer: Optimizer) -> list[int]:
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def test_the_default_is_adamw_over_all_parameters() -> None:
    model = nn.Linear(2, 1)
    optimizer = make_optimizer(None, model)
    assert type(optimizer) is AdamW
    assert parameters_of(optimizer) == [id(model.weight), id(model.bias)]


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", SGD), ("Adam", Adam), ("ADAMW", AdamW), ("adamw_torch", AdamW)]
)
def test_a_name_in_any_case(name: str, kind: type[Optimizer]) -> None:
    assert type(make_optimizer(name, nn.Linear(2, 1))) is kind


@pytest.mark.parametrize("name", ["adamw-fused", "adamw_fused", "adamw_torch_fused"])
def test_fused_adamw_has_a_name_too(name: str) -> None:
    assert make_optimizer(name, nn.Linear(2, 1)).defaults["fused"]


def test_every_name_is_a_class_of_torch_optim_that_trains_by_itself() -> None:
    names = optimizer_names()
    assert {"adafactor", "adagrad", "nadam", "rmsprop", "sparseadam"} <= set(names) | {
        "adafactor"  # PyTorch 2.5
    }
    assert not {"optimizer", "lbfgs"} & set(names)
    assert all(getattr(torch.optim, cls.__name__) is cls for cls in names.values())


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        find_optimizer("adamx")
    assert str(error.value).startswith("there is no optimizer 'adamx' in torch.optim; did you mean")
    assert "adam" in str(error.value)


def test_what_is_no_optimizer() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=r"^an object of type list is no .* try step\(model"):
        make_optimizer([SGD(model.parameters())], model)  # type: ignore[arg-type]


def test_a_name_like_no_other_is_told_with_all_there_are() -> None:
    with pytest.raises(UsageError, match=r"; there are adadelta, .*, sgd"):
        find_optimizer("???")


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    assert parameters_of(make_optimizer("sgd", model)) == [id(model.weight)]


def test_a_factory_gets_the_parameters() -> None:
    optimizer = make_optimizer(lambda params: SGD(params, lr=0.5), nn.Linear(2, 1))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_instance_is_taken_as_it_is() -> None:
    model = nn.Linear(2, 1)
    mine = SGD([model.bias])
    assert make_optimizer(mine, model) is mine


def test_a_factory_of_something_else() -> None:
    def factory(params: Any) -> Any:
        return "adam"

    with pytest.raises(StepError, match="the optimizer factory returned str, not a torch"):
        make_optimizer(factory, nn.Linear(2, 1))


@pytest.mark.parametrize("model", [nn.Linear(2, 1).requires_grad_(False), nn.ReLU()])
def test_a_model_without_anything_to_train(model: nn.Module) -> None:
    with pytest.raises(StepError, match="nothing to train; call requires_grad_"):
        make_optimizer(None, model)


def test_an_optimizer_that_trains_in_the_backward_pass_has_no_step() -> None:
    class Lomo(Optimizer):
        """Have no step, as lomo_optim's."""

    optimizer = Lomo(nn.Linear(2, 1).parameters(), {})
    with (
        pytest.raises(StepError, match=r"Lomo has no step\(\).*Try batchfinder run"),
        without_closure(optimizer),
    ):
        optimizer.step()
