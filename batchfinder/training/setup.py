"""What a user gives us to train: the model, one batch, and how a step is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.errors import UsageError
from batchfinder.training.state.reach import hooks_of

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
StepFunction: TypeAlias = Callable[[nn.Module, Any], Any]
MakeBatch: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class OptimizerOfModel:
    """An optimizer that is made of the whole model, not of a list of its parameters.

    Attributes:
        make: ``make(model) -> optimizer``.
        source: who makes it, as messages name it.
    """

    make: Callable[[nn.Module], Optimizer]
    source: str


OptimizerSpec: TypeAlias = Optimizer | OptimizerOfModel | Callable[[Any], Optimizer] | str


@runtime_checkable
class Trainer(Protocol):
    """What is asked of a ``transformers.Trainer``; whatever has all of it is taken for one."""

    args: Any
    model: Any
    optimizer: Any
    train_dataset: Any

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        """The loss of one batch."""

    def create_optimizer(self) -> Any:
        """Make the attribute ``optimizer``, unless there is one."""

    def get_train_dataloader(self) -> Any:
        """What yields the batches."""


@dataclass(frozen=True)
class TrainingSetup:
    """All that a training step is made of.

    Attributes:
        model: the module to train; or a ``transformers.Trainer``, which brings all that is left
            open below.
        sample: one batch as the DataLoader yields it, of any size from 1 on: any pytree of
            tensors with the batch dimension first. None: see ``make_batch``, or hints that the
            model itself carries.
        loss_fn: ``loss_fn(output, batch) -> loss``. None: taken from the output or the targets, or
            the ``training_step`` of a LightningModule.
        optimizer: an instance over the model's parameters, a factory ``factory(params)``, or the
            name of a class of ``torch.optim``. None: what a LightningModule configures, else AdamW.
        step: ``step(model, batch) -> loss``, in place of forward pass and loss function; its
            backward pass and the step of ``optimizer`` follow. Or ``step(model, batch) -> None``,
            in place of all of it: it runs its own backward passes and optimizers.
        make_batch: ``make_batch(batch_size) -> batch``, in place of repeating the sample. Or
            ``make_batch(batch_size, step) -> batch``, where lengths vary from step to step: step 0
            gets the longest batch. Beside a sample, which is the longest then, it is only asked for
            later steps.
        loader: in place of a sample: the DataLoader that you train with, or a data set, or
            ``(data set, collate function)``. Batches of any size are drawn from its data set: the
            longest first, others in the order of its sampler from a fixed seed.

    Example:
        >>> import torch
        >>> setup = TrainingSetup(torch.nn.Linear(4, 2), torch.randn(8, 4), optimizer="sgd")
    """

    model: nn.Module
    sample: Any = None
    loss_fn: LossFunction | None = None
    optimizer: OptimizerSpec | None = None
    step: StepFunction | None = None
    make_batch: MakeBatch | None = None
    loader: Any = None

    @property
    def functions(self) -> list[Any]:
        """The functions of the user's that a step runs: step, loss, and the hooks of the model."""
        return [self.step, self.loss_fn, *hooks_of(self.model)]


def setup_of(model: nn.Module | Trainer | TrainingSetup, *given: Any) -> TrainingSetup:
    """The setup that the first arguments of a public function amount to.

    Args:
        model: a module or a Trainer, or a setup instead of all that ``given`` has.
        given: the other attributes of a setup, in their order.

    Raises:
        UsageError: there is both a setup and something beside it, or the model is none.
    """
    if isinstance(model, TrainingSetup):
        setup = model
        if any(value is not None for value in given):
            raise UsageError("give the sample and functions in the TrainingSetup, not beside it")
    else:
        setup = TrainingSetup(cast("nn.Module", model), *given)
    if not isinstance(setup.model, nn.Module | Trainer):
        raise UsageError(f"the model is {type(setup.model).__name__}, not a torch.nn.Module")
    return setup
