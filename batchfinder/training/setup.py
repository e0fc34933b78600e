"""The user's input: the model, one batch, and the functions that make a training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from batchfinder.errors import UsageError
from batchfinder.training.state.reach import hooks_of

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
StepFunction: TypeAlias = Callable[[nn.Module, Any], Any]
MakeBatch: TypeAlias = Callable[..., Any]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The precisions of a step, by name."""


@dataclass(frozen=True)
class OptimizerOfModel:
    """A factory of an optimizer that needs the whole model, not a list of its parameters."""

    make: Callable[[nn.Module], Optimizer]
    source: str


OptimizerSpec: TypeAlias = Optimizer | OptimizerOfModel | Callable[[Any], Optimizer] | str


@runtime_checkable
class Trainer(Protocol):
    """The parts of a ``transformers.Trainer`` in use. Any object with all of them counts as one."""

    args: Any
    model: Any
    optimizer: Any
    train_dataset: Any

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        """Return the loss of one batch."""

    def create_optimizer(self) -> Any:
        """Set the attribute ``optimizer``, unless it is set."""

    def get_train_dataloader(self) -> Any:
        """Return the loader that yields the batches."""


@dataclass(frozen=True)
class TrainingSetup:
    """Everything that a training step needs.

    Attributes:
        model: the module to train; or a ``transformers.Trainer``, which brings everything that is
            None below.
        sample: one batch as the DataLoader yields it, of any size from 1 on: any pytree of
            tensors with the batch dimension first. None: batches come from ``make_batch``,
            ``loader``, or an example input of the model.
        loss_fn: ``loss_fn(output, batch) -> loss``. None: the loss comes from the output, the
            targets, or the ``training_step`` of a LightningModule.
        optimizer: an instance over the model's parameters, a factory ``factory(params)``, or the
            name of a class of ``torch.optim``. None: the LightningModule's own, else AdamW.
        step: ``step(model, batch) -> loss`` replaces forward pass and loss function. The backward
            pass and the step of ``optimizer`` follow. ``step(model, batch) -> None`` replaces the
            whole step: it runs its own backward passes and optimizers. Its variables stay alive
            until the next step, as in a loop with these lines.
        make_batch: ``make_batch(batch_size) -> batch``, instead of repeating the sample. Or
            ``make_batch(batch_size, step) -> batch`` if lengths vary from step to step. Step 0
            gets the longest batch. With a sample, which then is the longest batch, it is called
            only for later steps.
        loader: the DataLoader that you train with, a data set, or ``(data set, collate function)``,
            instead of a sample. A DataLoader or a LightningDataModule given as the sample counts as
            this one. Batches of any size are drawn from its data set: the longest first, others in
            the order of its sampler from a fixed seed. If the collate function joins examples and
            the sampler is random, the first batch is the largest of many draws.
        examples: the number of examples in an epoch, if it is known. A larger batch causes a
            warning. Default: that of the ``loader`` or the Trainer.

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
    examples: int | None = None

    def __post_init__(self) -> None:
        # Attributes of the sample itself may be its keys.
        is_module = callable(getattr(type(self.sample), "train_dataloader", None))
        if (is_module or isinstance(self.sample, DataLoader)) and self.loader is None:
            object.__setattr__(self, "loader", self.sample)
            object.__setattr__(self, "sample", None)

    def warning_of(self, batch_size: int) -> str:
        """Return a warning of a batch that is larger than an epoch; "" if it is not."""
        if self.examples is None or batch_size <= self.examples:
            return ""
        return (
            f"an epoch has only {self.examples} examples, and no batch of your data has more. Give "
            f"{self.examples} as the largest batch size, or less for more steps in an epoch"
        )

    @property
    def functions(self) -> list[Any]:
        """The user's functions that a step runs: step, loss function, and the model's hooks."""
        return [self.step, self.loss_fn, *hooks_of(self.model)]


def parameters_taken(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none if its signature is unknown."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled and built-in functions may have none
        return {}


def refused_call(
    function: Callable[..., Any],
    positional: Sequence[Any],
    keywords: Mapping[str, Any],
    *,
    follow_wrapped: bool = True,
) -> str:
    """Return why the signature of a function refuses a call; "" if it accepts it, or is unknown.

    The signature is that of the function which a decorator wraps, unless ``follow_wrapped`` is
    False. It may differ from the decorated one's: only a call that failed shows that it matters.

    Example:
        >>> refused_call(lambda batch: None, ("model", "batch"), {})
        'too many positional arguments'
    """
    try:
        signature = inspect.signature(function, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return ""


def check_functions(setup: TrainingSetup) -> None:
    """Check that the user's functions take the arguments that they are called with."""
    calls: dict[str, list[tuple[str, ...]]] = {
        "step": [("model", "batch")],
        "loss_fn": [("output", "batch")],
        "make_batch": [("batch_size",), ("batch_size", "step")],
        "optimizer": [("parameters",)],
    }
    for name, ways in calls.items():
        function = getattr(setup, name)
        if callable(function) and all(
            refused_call(function, way, {}, follow_wrapped=False) for way in ways
        ):
            wanted = ", ".join(ways[0])
            taken = inspect.signature(function, follow_wrapped=False)
            raise UsageError(
                f"{name} is called as {name}({wanted}), but it takes {taken}. "
                f"Try a function that takes ({wanted})"
            )


def setup_of(model: nn.Module | Trainer | TrainingSetup, *given: Any) -> TrainingSetup:
    """Return the setup from the first arguments of a public function."""
    if isinstance(model, TrainingSetup):
        setup = model
        if any(value is not None for value in given):
            raise UsageError("give the sample and functions in the TrainingSetup, not beside it")
    else:
        setup = TrainingSetup(cast("nn.Module", model), *given)
    if not isinstance(setup.model, nn.Module | Trainer):
        raise UsageError(
            f"the model is {described(setup.model)}; it must be a torch.nn.Module{_hint(model)}"
        )
    return setup


def _hint(model: object) -> str:
    """Return the end of a message about a wrong model: how to get the right one out of it."""
    if callable(model):
        return ". Try to call it"
    is_target = isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], nn.Module)
    return ". Try model, sample = build_model(), and give both" if is_target else ""


def described(value: object) -> str:
    """Return what a value is, for the message that it is no model."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}, not an instance of it"
    if isinstance(value, TrainingSetup):
        return f"a TrainingSetup whose model is {described(value.model)}"
    if isinstance(value, tuple):
        return f"a tuple ({', '.join(type(item).__name__ for item in value)})"
    return f"an object of type {type(value).__name__}"
