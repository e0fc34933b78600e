"""Where a sample comes from, and how a module trains that says so itself."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchfinder.errors import SampleError, StepError, UsageError
from batchfinder.training.complete_setup import completed
from batchfinder.training.frameworks.lightning import OwnTrainingStep
from batchfinder.training.setup import TrainingSetup


def test_only_a_hint_of_the_model_brings_a_warning() -> None:
    model = nn.Linear(4, 2)
    model.example_input_array = torch.full((1, 4), 4.0)
    own, warnings = completed(TrainingSetup(model, torch.full((1, 4), 1.0)))
    assert own.sample[0, 0] == 1
    assert warnings == []
    hinted, warnings = completed(TrainingSetup(model))
    assert hinted.sample[0, 0] == 4
    assert warnings == [
        "no sample was given: the answer holds for the example input that the model carries "
        "(sample [1, 4]); give a batch as your DataLoader yields it"
    ]


def test_setup_with_make_batch_needs_no_sample() -> None:
    setup = TrainingSetup(nn.Linear(4, 2), make_batch=lambda n: torch.zeros(n, 4))
    assert completed(setup)[0].sample is None


def test_no_sample_at_all_names_every_way() -> None:
    with pytest.raises(SampleError) as info:
        completed(TrainingSetup(nn.Linear(4, 2)))
    ways = ("(model, sample)", "build_sample", "--sample", "--input", "make_batch")
    assert [way for way in ways if way not in str(info.value)] == []


@pytest.mark.parametrize("hooks", [True, False])
def test_a_model_that_accelerate_offloads_is_refused(hooks: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    hook: Any = SimpleNamespace(offload=True)
    hook = SimpleNamespace(hooks=(SimpleNamespace(), hook)) if hooks else hook
    vars(model[1])["_hf_hook"] = hook
    vars(model[0])["_hf_hook"] = SimpleNamespace(offload=False)
    with pytest.raises(StepError, match="weights of 1 are offloaded") as info:
        completed(TrainingSetup(model, torch.zeros(2, 4)))
    assert "Try loading" in str(info.value)


class OwnStep(nn.Linear):
    """Trains itself, as a LightningModule does."""

    def training_step(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        raise NotImplementedError


def test_a_module_that_trains_itself_does_so_unless_the_setup_says_otherwise() -> None:
    model, sample = OwnStep(4, 2), torch.zeros(2, 4)
    assert isinstance(completed(TrainingSetup(model, sample))[0].step, OwnTrainingStep)
    made = TrainingSetup(model, make_batch=lambda n: torch.zeros(n, 4))
    assert isinstance(completed(made)[0].step, OwnTrainingStep)
    assert completed(TrainingSetup(model, sample, loss_fn=nn.MSELoss()))[0].step is None
    own = TrainingSetup(model, sample, step=lambda model, batch: model(batch).mean())
    assert completed(own)[0].step is own.step
    assert completed(TrainingSetup(nn.Linear(4, 2), sample))[0].step is None


def test_the_example_input_of_a_module_is_no_batch_for_its_training_step() -> None:
    model = OwnStep(4, 2)
    model.example_input_array = torch.zeros(1, 4)
    assert completed(TrainingSetup(model))[0].step is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"step": lambda batch: batch}, r"step\(model, batch\), but it takes \(batch\)"),
        ({"loss_fn": lambda output: output}, r"loss_fn\(output, batch\), but it takes \(output\)"),
        ({"make_batch": lambda: torch.zeros(2, 4)}, r"make_batch\(batch_size\), but it takes \(\)"),
        ({"optimizer": lambda: None}, r"optimizer\(parameters\), but it takes \(\)"),
    ],
)
def test_a_function_with_other_arguments_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        completed(TrainingSetup(nn.Linear(4, 2), torch.zeros(2, 4), **given))


def decorated(function: Any) -> Any:
    """A decorator that gives the function other arguments than it gets itself."""

    @functools.wraps(function)
    def step(model: nn.Module, batch: Tensor) -> Any:
        return function(batch)

    return step


@pytest.mark.parametrize(
    "given",
    [
        {"step": lambda *arguments: arguments},
        {"step": decorated(lambda batch: batch)},
        {"loss_fn": nn.CrossEntropyLoss()},
        {"make_batch": lambda n, step: torch.zeros(n, 4 + step)},
        {"optimizer": torch.optim.SGD},
        {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)},
    ],
)
def test_a_function_that_takes_its_arguments_is_accepted(given: dict[str, Any]) -> None:
    setup = TrainingSetup(nn.Linear(4, 2), torch.zeros(2, 4), **given)
    assert completed(setup)[0].step is given.get("step")
