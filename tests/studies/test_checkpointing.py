"""Checkpointing of a model that was built without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.frameworks.trainers import Trainer, opened

from batchfinder.errors import StepError
from batchfinder.probing.options import ProbeOptions
from batchfinder.studies.apply_strategy import applied
from batchfinder.studies.checkpointing import (
    apply_checkpointing,
    is_checkpointed,
    model_kept,
    with_checkpointing,
)
from batchfinder.studies.strategies import Strategy, parse_strategy
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.step import TrainingStep


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.inner(x))


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.scale = nn.Buffer(torch.ones(8)) if hasattr(nn, "Buffer") else None
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


class Offers(Stack):
    """A model with checkpointing of its own, as those of timm have it."""

    is_on = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.is_on = enable


class Refuses(Stack):
    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        raise ValueError("Refuses does not support gradient checkpointing.")


def saved_bytes(model: nn.Module) -> int:
    """How much a forward pass keeps for the backward pass."""
    sizes = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.randn(64, 8, requires_grad=True))
    output.sum().backward()
    return sum(sizes.values())


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    model(torch.randn(4, 8)).sum().backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def state_of(model: nn.Module) -> list[Any]:
    return [(name, id(module), [*vars(module)]) for name, module in model.named_modules()]


# PyTorch 2.14 warns that hooks such as those of `saved_bytes` do not see all that is kept.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("how", ["checkpointing", "selective-checkpointing"])
def test_blocks_are_recomputed_and_the_model_is_afterwards_as_before(how: str) -> None:
    model = Stack()
    before, plain, expected = state_of(model), saved_bytes(model), gradients(model)
    with model_kept(model):
        blocks = apply_checkpointing(model, how)
        saved, made = saved_bytes(model), gradients(model)
    assert blocks == "3 x Block (blocks.0 to blocks.2)"
    assert saved < plain
    assert all(map(torch.equal, made, expected))
    assert state_of(model) == before
    assert saved_bytes(model) == plain


def test_what_the_model_offers_comes_first_and_is_switched_off_again() -> None:
    model = Offers()
    with model_kept(model):
        assert apply_checkpointing(model, "checkpointing").endswith(", by set_grad_checkpointing()")
        assert model.is_on
    assert not model.is_on
    assert "is_on" not in vars(model)


def test_a_model_that_refuses_its_own_is_wrapped() -> None:
    model = Refuses()
    with model_kept(model):
        assert apply_checkpointing(model, "checkpointing") == "3 x Block (blocks.0 to blocks.2)"


def test_without_blocks_there_is_nothing_to_recompute() -> None:
    with pytest.raises(StepError, match="no repeated blocks to checkpoint"):
        apply_checkpointing(nn.Linear(2, 2), "checkpointing")


@pytest.mark.parametrize("how", ["no-checkpointing", "checkpointing"])
def test_a_strategy_replaces_what_the_arguments_of_a_trainer_say(how: str) -> None:
    trainer = Trainer(gradient_checkpointing=True, gradient_checkpointing_kwargs={"mine": 1})
    setup, _ = opened(trainer)
    assert is_checkpointed(setup)
    changed, _ = with_checkpointing(setup, how)
    TrainingStep(changed, torch.device("cpu")).forward_backward(changed.sample)
    expected = None if how == "no-checkpointing" else {"use_reentrant": False}
    assert trainer.model.saves_activations == expected
    assert is_checkpointed(setup)


def test_pure_bf16_gives_every_bit_back() -> None:
    model = Stack()
    gradients(model)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    kept = [
        (p, p.data_ptr(), p.clone(), p.grad, p.grad.clone())
        for p in model.parameters()
        if p.grad is not None
    ]
    setup = TrainingSetup(model, (torch.randn(4, 8), torch.arange(4)), optimizer=optimizer)
    with applied(parse_strategy("pure-bf16+checkpointing"), setup, ProbeOptions()) as step:
        assert {p.dtype for p in step.setup.model.parameters()} == {torch.bfloat16}
        assert step.setup.sample[0].dtype is torch.bfloat16
        assert step.setup.sample[1].dtype is torch.int64
        assert callable(step.setup.optimizer)
        made = step.setup.optimizer(step.setup.model.parameters())
        assert type(made) is type(optimizer)
        assert made.defaults == optimizer.defaults
    for parameter, place, values, gradient, slope in kept:
        assert parameter.data_ptr() == place
        assert torch.equal(parameter, values)
        assert parameter.grad is gradient
        assert torch.equal(gradient, slope)
    assert setup.optimizer is optimizer


def test_pure_bf16_takes_a_model_without_values() -> None:
    with torch.device("meta"):
        model = Stack()
    setup = TrainingSetup(model, (torch.randn(4, 8), torch.arange(4)))
    with applied(parse_strategy("pure-bf16"), setup, ProbeOptions()) as step:
        assert {(p.dtype, p.is_meta) for p in step.setup.model.parameters()} == {
            (torch.bfloat16, True)
        }
    assert {(p.dtype, p.is_meta) for p in model.parameters()} == {(torch.float32, True)}


def test_a_make_batch_is_cast_too_and_keeps_its_signature() -> None:
    def make_batch(batch_size: int, step: int) -> Tensor:
        return torch.full((batch_size, 8), float(step))

    setup = TrainingSetup(Stack(), torch.zeros(2, 8), make_batch=make_batch)
    with applied(Strategy(precision="pure-bf16"), setup, ProbeOptions()) as step:
        assert step.setup.sample.dtype is torch.bfloat16  # the longest batch, of step 0
        assert step.setup.make_batch is not None
        assert step.setup.make_batch(2, 3).dtype is torch.bfloat16
