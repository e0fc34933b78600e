"""Modules that bring their training step and optimizer, as LightningModules do."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from batchfinder import TrainingSetup, estimate_max_batch, find_max_batch
from batchfinder.errors import StepError
from batchfinder.estimator import estimate_on_gpus
from batchfinder.probing.options import ProbeOptions
from batchfinder.simulation.gpus import find_gpu
from batchfinder.simulation.tracing.data_parallel import Cluster
from batchfinder.training.complete_setup import completed
from batchfinder.training.frameworks.lightning import OwnTrainingStep, own_optimizer
from batchfinder.training.optimizer import make_optimizer
from batchfinder.training.state.patching import replaced
from batchfinder.training.step import TrainingStep

CPU = torch.device("cpu")
BATCH = torch.randn(4, 8), torch.randn(4, 2)


class Regression(nn.Module):
    """The least that a LightningModule has."""

    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.indices: list[int] = []

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.layer(rows)
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        self.indices.append(batch_idx)
        return nn.functional.mse_loss(self(inputs), targets)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


class GivesADict(Regression):
    def training_step(self, batch: Any, batch_idx: int, mode: str = "train") -> Any:
        assert mode == "train"
        return {"loss": super().training_step(batch, batch_idx), "rows": len(batch[0])}


class TakesTheBatchAlone(Regression):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


class TakesKeywords(Regression):
    def training_step(  # type: ignore[override]
        self, batch: Any, *, batch_idx: int = 0, **more: Any
    ) -> Any:
        return super().training_step(batch, batch_idx)


class TakesAnything(Regression):
    def training_step(self, *arguments: Any) -> Any:
        batch, batch_idx = arguments
        return super().training_step(batch, batch_idx)


KINDS = [Regression, GivesADict, TakesTheBatchAlone, TakesKeywords, TakesAnything]


def loss_of(model: nn.Module) -> Tensor:
    step = OwnTrainingStep()
    return step.loss_of(step(model, BATCH), BATCH)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_training_step(kind: type[Regression]) -> None:
    model = kind()
    loss = loss_of(model)
    assert loss == nn.functional.mse_loss(model(BATCH[0]), BATCH[1])
    assert model.indices == [0]


class Adversarial(nn.Module):
    """Optimizes by hand, with what LightningModules ask their Trainer for."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(8, 2), nn.Linear(2, 1)
        self.trained: list[list[bool]] = []

    def note(self) -> None:
        self.trained.append([part.weight.requires_grad for part in (self.maker, self.judge)])

    def training_step(self: Any, batch: Any) -> None:
        rows, targets = batch
        made_by, judged_by = self.optimizers()
        self.toggle_optimizer(judged_by)
        self.note()
        loss = self.judge(self.maker(rows)).mean() - self.judge(targets).mean()
        judged_by.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(judged_by, gradient_clip_val=0.1, gradient_clip_algorithm="value")
        judged_by.step()
        self.untoggle_optimizer(judged_by)
        self.note()
        made_by.zero_grad()
        self.manual_backward(-self.judge(self.maker(rows)).mean())
        self.clip_gradients(made_by, gradient_clip_val=1.0)
        made_by.step()
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        made_by, judged_by = (Adam(part.parameters()) for part in (self.maker, self.judge))
        return [made_by, judged_by], [StepLR(made_by, 1)]


def by_hand() -> TrainingSetup:
    setup, _ = completed(TrainingSetup(Adversarial(), BATCH))
    return setup


def test_a_module_that_optimizes_by_hand_trains_all_its_parts() -> None:
    setup = by_hand()
    before = copy.deepcopy(setup.model.state_dict())
    step = TrainingStep(setup, torch.device("cpu"))
    for _ in range(2):
        step.forward_backward(BATCH)
        step.optimizer_step()
    step.check_optimizers()
    after = setup.model.state_dict()
    assert not any(
        torch.equal(before[f"{name}.weight"], after[f"{name}.weight"])
        for name in ("maker", "judge")
    )
    assert setup.model.trained == [[False, True], [True, True]] * 2
    assert step.warnings == []
    assert not hasattr(setup.model, "optimizers")


def test_a_step_that_runs_out_of_memory_leaves_no_optimizer_toggled() -> None:
    setup = by_hand()
    step = TrainingStep(setup, torch.device("cpu"))
    full = replaced(setup.model.judge, forward=Mock(side_effect=torch.OutOfMemoryError))
    with full, pytest.raises(torch.OutOfMemoryError):
        step.forward_backward(BATCH)
    step.forward_backward(BATCH)
    assert setup.model.trained == [[False, True], [False, True], [True, True]]


def test_a_search_leaves_a_module_that_optimizes_by_hand_as_it_was() -> None:
    model = Adversarial()
    before = copy.deepcopy(model.state_dict())
    result = find_max_batch(model, BATCH, device="cpu", memory_limit="2GiB", max_batch_size=8)
    estimate = estimate_max_batch(model, BATCH, gpu="t4", max_batch_size=8)
    assert result.batch_size == estimate.batch_size == 8
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.trained == []
    assert estimate.explanation is not None


def test_a_step_of_the_users_goes_with_the_optimizer_of_a_module_by_hand() -> None:
    model = Regression()
    model.automatic_optimization = False
    setup, _ = completed(
        TrainingSetup(model, BATCH, step=lambda model, batch: model(batch[0]).sum())
    )
    assert isinstance(make_optimizer(setup.optimizer, model), SGD)


def test_by_hand_in_lower_precision() -> None:
    step = TrainingStep(by_hand(), torch.device("cpu"), precision="bf16")
    step.forward_backward(BATCH)
    with pytest.raises(StepError, match=r"returned None.*precision fp16 cannot be added"):
        TrainingStep(by_hand(), torch.device("cpu"), precision="fp16").forward_backward(BATCH)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_module_needs_a_step() -> None:
    with pytest.raises(StepError, match=r"torch\.compile does not reach the training_step"):
        find_max_batch(Regression(), BATCH, device="cpu", compile=True)


CONFIGURED: list[Callable[[Optimizer], Any]] = [
    lambda optimizer: optimizer,
    lambda optimizer: [optimizer],
    lambda optimizer: ([optimizer], [StepLR(optimizer, 1)]),
    lambda optimizer: {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1)},
    lambda optimizer: ([optimizer], [{"scheduler": StepLR(optimizer, 1), "interval": "step"}]),
    lambda optimizer: ({"optimizer": optimizer},),
]


@pytest.mark.parametrize("configured", CONFIGURED)
def test_the_optimizer_is_the_one_configured(
    configured: Callable[[Optimizer], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Regression()
    optimizer = Adam(model.parameters())
    monkeypatch.setattr(model, "configure_optimizers", lambda: configured(optimizer))
    assert own_optimizer(model) is optimizer


@pytest.mark.parametrize("number", [0, 2])
def test_other_than_one_optimizer_is_refused(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Regression()
    optimizers = [Adam(model.parameters()) for _ in range(number)]
    monkeypatch.setattr(model, "configure_optimizers", lambda: optimizers)
    with pytest.raises(StepError, match=f"gave {number or 'no'} optimizer"):
        own_optimizer(model)


class AsksForItsTrainer(Regression):
    @property
    def trainer(self) -> Any:
        raise RuntimeError("AsksForItsTrainer is not attached to a `Trainer`.")

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=1 / self.trainer.max_steps)


def test_without_a_trainer_the_optimizer_can_be_named() -> None:
    with pytest.raises(StepError, match="name the optimizer: --optimizer adamw"):
        own_optimizer(AsksForItsTrainer())
    model = AsksForItsTrainer()
    result = find_max_batch(model, BATCH, optimizer="sgd", device="cpu", max_batch_size=8)
    assert result.batch_size == 8


class GivesNothing(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class GivesNoLoss(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"rows": 4}


class CountsByItsTrainer(AsksForItsTrainer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.trainer.global_step


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (GivesNothing, "gave NoneType. Return the loss"),
        (GivesNoLoss, "gave dict without a loss. Return the loss"),
        (CountsByItsTrainer, "asks for its Trainer, which is not there yet; give a step"),
    ],
)
def test_a_step_without_a_loss_says_what_is_wrong(kind: type[Regression], told: str) -> None:
    with pytest.raises(StepError, match=told):
        loss_of(kind())


class SkipsSomeBatches(Regression):
    """Returns None to skip a batch, as Lightning's documentation says: by index, and its first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 0 or len(self.indices) < 5 else loss


def test_a_step_may_skip_batches_before_it_trains() -> None:
    result = find_max_batch(SkipsSomeBatches(), BATCH, device="cpu", max_batch_size=8)
    assert (result.batch_size, result.warnings) == (8, ())


class LooksAtItsGradients(Regression):
    """Notes whether gradients are there while it steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.indices.append(int(self.layer.weight.grad is not None))
        return super().training_step(batch, 0)


def test_gradients_are_kept_until_the_next_backward_pass_as_the_trainer_keeps_them() -> None:
    model = LooksAtItsGradients()
    setup, _ = completed(TrainingSetup(model, BATCH))
    step = TrainingStep(setup, torch.device("cpu"))
    for _ in range(2):
        step.forward_backward(BATCH)
        step.optimizer_step()
    assert model.indices[::2] == [0, 1]
    once = model.layer.weight.grad
    step.forward_backward(BATCH)
    assert model.layer.weight.grad is not once
    step.release()
    assert model.layer.weight.grad is None


class GivesItsRows(Regression):
    """Returns a tensor beside the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self(batch[0])
        self.rows = weakref.ref(rows)
        return {"loss": nn.functional.mse_loss(rows, batch[1]), "rows": rows}


def test_what_a_step_returned_lives_until_the_optimizer_has_stepped_as_in_the_trainer() -> None:
    model = GivesItsRows()
    setup, _ = completed(TrainingSetup(model, BATCH))
    step = TrainingStep(setup, torch.device("cpu"))

    def next_batch() -> Any:
        assert not hasattr(model, "rows") or model.rows() is None
        return BATCH

    for _ in range(2):
        for batch in step.fetch(next_batch):
            step.forward_backward(batch)
        step.optimizer_step()
        assert model.rows() is not None


def test_a_search_trains_it_as_it_says_and_leaves_nothing_behind() -> None:
    model = Regression()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    result = find_max_batch(model, BATCH, device="cpu", max_batch_size=8)

    assert (result.batch_size, result.warnings) == (8, ())
    assert model.indices == []
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_an_estimate_counts_the_states_of_its_optimizer() -> None:
    estimate = estimate_max_batch(Regression(), BATCH, gpu="t4", max_batch_size=8)
    kinds = estimate.explanation.terms
    assert kinds["optimizer states"] == 2 * 512  # momentum of weight and bias, a block each


@pytest.fixture
def job_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("job_of_one")
def test_a_wrapper_does_its_work_around_the_training_step() -> None:
    model = Regression()
    wrapper, calls = DistributedDataParallel(model), list[nn.Module]()
    wrapper.register_forward_hook(lambda module, inputs, output: calls.append(module))

    loss = loss_of(wrapper)

    assert loss == nn.functional.mse_loss(model(BATCH[0]), BATCH[1])
    assert calls == [wrapper]
    assert "forward" not in vars(model)
    model.forward = own = partial(Regression.forward, model)  # type: ignore[method-assign]
    loss_of(wrapper)
    assert vars(model)["forward"] is own


@pytest.mark.usefixtures("job_of_one")
def test_one_that_the_user_has_wrapped_trains_itself_too() -> None:
    wrapper = DistributedDataParallel(Regression())
    setup, _ = completed(TrainingSetup(wrapper, BATCH))
    assert isinstance(setup.step, OwnTrainingStep)
    assert make_optimizer(setup.optimizer, wrapper).defaults["momentum"] == 0.9


def test_a_rank_that_has_a_part_of_the_states_needs_a_factory() -> None:
    cluster = Cluster("zero1", 2)
    setup, _ = completed(TrainingSetup(Regression(), BATCH))
    with pytest.raises(StepError, match="Try the optimizer's name or a factory"):
        estimate_on_gpus(setup, [find_gpu("t4")], ProbeOptions(), cluster=cluster)


class Validated(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.indices.append(100)
        return self(batch[0])


def test_a_validation_is_its_validation_step() -> None:
    model = Validated()
    step = TrainingStep(completed(TrainingSetup(model, BATCH))[0], CPU, eval_batch_size=4)
    step.forward_backward(BATCH)
    step.optimizer_step()
    step.validate(lambda: BATCH)
    assert model.indices == [0, 100, 100]
    step = TrainingStep(completed(TrainingSetup(Regression(), BATCH))[0], CPU, eval_batch_size=4)
    step.validate(lambda: BATCH)  # by its forward pass
