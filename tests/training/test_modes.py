"""Forward passes without training: after a step, beside its states, and alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from batchfinder import TrainingSetup, estimate_peak_memory, find_max_batch
from batchfinder.errors import StepError, UsageError
from batchfinder.probing.devices.cpu import CpuDevice
from batchfinder.training.modes.evaluation import in_eval_mode
from batchfinder.training.modes.forward_step import STEP_OF_MODE
from batchfinder.training.step import TrainingStep
from batchfinder.units import MIB

CPU = torch.device("cpu")
BATCH = torch.randn(3, 4), torch.tensor([0, 1, 1])


class Spy(nn.Module):
    """Notes how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.calls: list[tuple[bool, bool, int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        has_gradients = self.layer.weight.grad is not None
        self.calls.append((self.training, torch.is_grad_enabled(), len(x), has_gradients))
        return self.layer(x)  # type: ignore[no-any-return]


def step_of(mode: str, setup: TrainingSetup, **options: Any) -> TrainingStep:
    step = STEP_OF_MODE[mode](setup, CPU, **options)
    step.begin(3, lambda: BATCH, is_first=True)
    return step


def run(step: TrainingStep) -> None:
    for batch in step.fetch(lambda: BATCH):
        step.forward_backward(batch)
    step.optimizer_step()


def test_a_validation_follows_the_step_while_gradients_are_there() -> None:
    model = Spy()
    step = step_of("train", TrainingSetup(model), eval_batch_size=5)
    for _ in range(2):
        run(step)
        run(step)
        step.validate(lambda: (torch.randn(5, 4), torch.zeros(5, dtype=torch.long)))
    training, validation = (True, True, 3, False), (False, False, 5, True)
    assert model.calls == 2 * [training, training, validation, validation]
    assert model.training


def test_the_mode_of_each_module_is_as_before() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4).eval(), nn.Linear(4, 2))
    with in_eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, True]


@pytest.mark.parametrize("optimizer", [Adam, lambda p: SGD(p, momentum=0.9)])
def test_in_eval_mode_the_states_of_a_training_are_there(optimizer: Any) -> None:
    model = Spy()
    step = step_of("eval", TrainingSetup(model, optimizer=optimizer))
    run(step)
    assert model.calls == [*2 * [(True, True, 3, False)], *2 * [(False, False, 3, True)]]
    assert len(step.optimizer.state) == 2
    step.release()
    assert model.layer.weight.grad is None


def test_the_optimizers_of_a_step_that_trains_by_itself_are_there() -> None:
    model = Spy()
    optimizer = Adam(model.parameters())

    def train(model: nn.Module, batch: Any) -> None:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if torch.is_grad_enabled():
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    run(step_of("eval", TrainingSetup(model, step=train)))
    assert len(optimizer.state) == 2
    assert [is_training for is_training, *_ in model.calls] == [True, True, False, False]


def test_a_step_that_always_trains_cannot_validate() -> None:
    def train(model: nn.Module, batch: Any) -> None:
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]

    step = TrainingStep(TrainingSetup(Spy(), step=train), CPU, eval_batch_size=3)
    run(step)
    with pytest.raises(StepError, match=r"Try `if torch.is_grad_enabled\(\):`"):
        step.validate(lambda: BATCH)


def test_inference_is_the_model_alone() -> None:
    model = Spy().requires_grad_(False)

    def fail(output: Any, batch: Any) -> Tensor:
        raise AssertionError

    step = step_of("inference", TrainingSetup(model, loss_fn=fail))
    run(step)
    assert model.calls == 2 * [(False, False, 3, False)]


def test_a_model_without_a_loss_in_eval_mode_validates() -> None:
    class Detector(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            output = super().forward(x)
            return {"loss": output.mean()} if self.training else [{"boxes": output}]

    run(step_of("eval", TrainingSetup(Detector(4, 2))))


def test_an_estimate_knows_the_modes_and_the_validation() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    sample = torch.randn(2, 512), torch.randn(2, 512)

    def peak(**options: Any) -> int:
        estimate = estimate_peak_memory(model, sample, batch_size=64, gpu="t4", **options)
        return estimate.peak_allocated_bytes

    weights = 2 * 512 * 512 * 4
    training, evaluation, inference = (peak(mode=mode) for mode in ("train", "eval", "inference"))
    assert training > evaluation > inference
    assert evaluation - inference >= 3 * weights  # gradients and both states of AdamW
    # The input, and the outputs of a layer and of its activation.
    assert peak(eval_batch_size=20_000) - training >= 2 * 20_000 * 512 * 4


def test_a_training_that_would_die_in_its_validation_is_found_out() -> None:
    model = nn.Linear(1024, 1024)
    sample = torch.randn(2, 1024), torch.randn(2, 1024)
    limit = CpuDevice().held_bytes() + 500 * MIB  # other tests have left something in this process
    options: dict[str, Any] = {"device": "cpu", "memory_limit": limit, "max_batch_size": 8}
    result = find_max_batch(model, sample, eval_batch_size=64, **options)
    assert (result.batch_size, result.eval_batch_size) == (8, 64)
    assert "batches of 64 ran too" in result_text(result)
    result = find_max_batch(model, sample, eval_batch_size=100_000, **options)
    assert result.batch_size == 0
    assert "Its validation, with batches of 100000, runs out of memory" in result_text(result)


def result_text(result: Any) -> str:
    from batchfinder.reporting.answer import details, headline

    return " ".join([*headline(result), *details(result)])


@pytest.mark.parametrize(
    "options", [{"mode": "test"}, {"eval_batch_size": 0}, {"mode": "eval", "accumulate": True}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        find_max_batch(nn.Linear(4, 2), BATCH, device="cpu", **options)
