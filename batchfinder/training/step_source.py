"""The sources of a training step: a plain loop, the user's ``step``, or a framework's trainer."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.errors import StepError
from batchfinder.training.calling import Way, as_parts, call_model, way_of
from batchfinder.training.loop_variables import LoopVariables
from batchfinder.training.loss import caller_of, default_loss, own_loss
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import StepFunction, TrainingSetup
from batchfinder.training.tree import named_tensors

_RETURN_THE_LOSS = "return the loss before its backward pass: that and the optimizer step follow"


class KeptUntil(enum.Enum):
    """The moment at which training releases the output and the loss of a step."""

    NEXT = "the next step's value takes its place, as in the variables of a plain loop"
    STEP = "the optimizer has stepped"
    BACKWARD = "the backward pass has ended"


@dataclass
class Kept:
    """What a step keeps alive until the next one, or for as long as ``kept_until`` says."""

    batch: Any = None
    output: Any = None
    loss: Any = None


@runtime_checkable
class StepSource(Protocol):
    """The part of a training step that differs from one kind of training to another.

    Attributes:
        name: the name of the function or model that makes the loss, for messages.
        accumulates: it accumulates gradients over several micro-batches.
        batches_ahead: the number of micro-batches on the device while one of them trains; None:
            one at a time.
        keeps_gradients: the gradients of the last step live until the next backward pass, not
            only until the optimizer has stepped.
        returns_loss: it must return a loss; otherwise it may return None, if it trains by itself.
        runs_backward: the step runs its backward pass and returns a detached loss. The optimizer's
            step follows.
        kept_until: when output and loss are released; without ``batches_ahead`` the batch too.
        takes_bf16: a step that trains by itself may run under bf16 autocast.
        eval_batch_size: the number of examples in each batch of the validation that is part of
            this training; None: only the user may ask for a validation.
        eval_batches: makes the batches of the validation; None: they are those of the training.
        clears_gradients: the step clears the gradients before a validation begins.
        precision: ``"bf16"`` or ``"fp16"`` if the step has an autocast of its own; None if not.
        compiles: the training that the step stands for compiles its model.
        checkpoints: the step turns on the model's activation checkpointing.
    """

    name: str
    accumulates: bool = False
    batches_ahead: int | None = None
    keeps_gradients: bool = False
    returns_loss: bool = True
    runs_backward: bool = False
    kept_until: KeptUntil = KeptUntil.NEXT
    takes_bf16: bool = False
    eval_batch_size: int | None = None
    eval_batches: BatchMaker | None = None
    clears_gradients: bool = False
    precision: str | None = None
    compiles: bool = False
    checkpoints: bool = False

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Run the forward pass and return its output."""

    def train_with(self, optimizer: Optimizer) -> None:
        """Note the optimizer whose step follows, if the step itself uses it."""
        return

    def loss_of(self, output: Any, batch: Any) -> Tensor | None:
        """Return the loss of the output, by default the output itself.

        It is None if the step has trained by itself.
        """
        loss: Tensor | None = output
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        """Run forward pass and loss of a validation. Return the part kept until the next batch."""
        output = self(model, batch)
        self.loss_of(output, batch)
        return output

    def validation(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for the batches of one validation."""
        return nullcontext()

    def infer(self, model: nn.Module, batch: Any) -> Any:
        """Run only the forward pass of the model, and return its output."""
        return call_model(model, batch, way_of(model, batch, for_loss=False))

    def release(self) -> None:
        """Release what it keeps from step to step besides the output."""
        return


class PlainLoop(StepSource):
    """``output = model(batch)``, then ``loss = loss_fn(output, batch)``."""

    def __init__(self, setup: TrainingSetup, warn: Callable[[str], None]) -> None:
        self.name = "loss_fn" if setup.loss_fn else "the model"
        self._loss_fn = caller_of(setup.loss_fn) if setup.loss_fn else None
        self._warn = warn
        self._way: Way | None = None  # chosen for the first batch, for all that are alike

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Call the model on its part of the batch."""
        self._way = self._way or way_of(model, batch)
        return call_model(model, batch, self._way)

    def loss_of(self, output: Any, batch: Any) -> Tensor | None:
        """Return the loss of the output."""
        if self._loss_fn is not None:
            return self._loss_fn(output, batch)
        loss, warning = default_loss(output, batch, model_got_all=self._way is as_parts)
        if warning:
            self._warn(warning)
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        """Run the forward pass, and the loss if the model allows one in eval mode."""
        output = self(model, batch)
        if self._loss_fn is not None:
            self._loss_fn(output, batch)
        else:
            with suppress(StepError):  # detectors return no loss in eval mode
                default_loss(output, batch, model_got_all=self._way is as_parts)
        return output


class UserStep(StepSource):
    """The user's ``step(model, batch)``, which returns the loss, or an output that has one."""

    name = "step"
    returns_loss = False

    def __init__(self, step: StepFunction) -> None:
        self._step = step
        # A step that clears the gradients itself may do so after its forward pass.
        code = getattr(step, "__code__", None)
        self.keeps_gradients = "zero_grad" in getattr(code, "co_names", ())
        self._variables = LoopVariables(step)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Call the step. Its result and its variables stay alive, as in a loop of its lines."""
        return self._variables(model, batch)

    def loss_of(self, output: Any, batch: Any) -> Tensor | None:
        """Return the loss that the step returned, alone or in its output."""
        loss = own_loss(output)
        return output if loss is None else loss

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        """Call the step with gradients disabled. Then it must not run a backward pass."""
        try:
            return self._step(model, batch)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise StepError(
                "step runs its backward pass in a validation too. Try `if "
                "torch.is_grad_enabled():` around its backward pass and optimizer step"
            ) from error

    infer = evaluate  # only the step knows how to call the model

    def release(self) -> None:
        """Release the step's variables."""
        self._variables.values.clear()


class OldOutput:
    """Makes blocks as large as an output would be at another batch size.

    A probe runs one step. In training, the output of the step before is still alive during the
    forward pass, such as gigabytes of logits of a language model. These blocks replace it.

    Example:
        >>> old = OldOutput(torch.device("cpu"), batch_dim=0)
        >>> old.note(torch.ones(2, 3, requires_grad=True) * 1, batch_size=2)
        >>> [block.numel() for block in old.blocks(batch_size=8)]
        [96]
    """

    def __init__(self, device: torch.device, batch_dim: int) -> None:
        self._device = device
        self._batch_dim = batch_dim
        self._batch_size = 1
        self._storages: dict[int, tuple[int, bool]] = {}

    def note(self, output: Any, batch_size: int) -> None:
        """Note the bytes of an output's storages, and which of them grow with the batch size."""
        self._batch_size = batch_size
        self._storages = {}
        for _, tensor in named_tensors(output):
            if tensor.grad_fn is not None and tensor.device.type == self._device.type:
                has_examples = tensor.dim() > self._batch_dim
                grows = has_examples and tensor.shape[self._batch_dim] == batch_size
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = storage.nbytes(), grows

    def blocks(self, batch_size: int) -> list[Tensor]:
        """Allocate a block for each storage, scaled to a batch size; none before :meth:`note`."""
        return [
            filled_block(size * batch_size // self._batch_size if grows else size, self._device)
            for size, grows in self._storages.values()
        ]


def filled_block(size_bytes: int, device: torch.device | None) -> Tensor:
    """Allocate a block. It is filled, as on the CPU only memory that was written to counts."""
    return torch.full((size_bytes,), 1, dtype=torch.uint8, device=device)


def source_of(setup: TrainingSetup, warn: Callable[[str], None]) -> StepSource:
    """Return the source of a setup's step."""
    if isinstance(setup.step, StepSource):
        return setup.step
    return PlainLoop(setup, warn) if setup.step is None else UserStep(setup.step)


def own_precision(setup: TrainingSetup) -> str | None:
    """Return the precision that a setup's step sets itself; None if it runs under any."""
    return setup.step.precision if isinstance(setup.step, StepSource) else None


def remarks_on_compiling(source: StepSource, *, compiled: bool) -> list[str]:
    """Return a remark if training compiles its model, and these steps do not."""
    if compiled or not source.compiles:
        return []
    return [
        "training compiles its model, but these steps are not compiled and use other memory. Try "
        "batchfinder find --compile, or compile=True in Python"
    ]


def checked_loss(loss: Any, source: StepSource) -> Tensor:
    """Return the loss if it can be trained with."""
    if not isinstance(loss, Tensor):
        raise StepError(
            f"{source.name} gave an object of type {type(loss).__name__} as the loss, not a "
            f"tensor. {_advice(source)}"
        )
    if loss.numel() != 1:
        raise StepError(
            f"{source.name} gave a loss of shape {tuple(loss.shape)}; reduce it to one number, "
            "with .mean() for example"
        )
    if not loss.requires_grad:
        raise StepError(
            "the loss does not depend on any parameter that requires a gradient: nothing to "
            "train; look for torch.no_grad(), detach() or frozen parameters"
            f"{'' if isinstance(source, PlainLoop) else f'. {_advice(source)}'}"
        )
    return loss


def had_its_backward_pass(source: StepSource) -> StepError:
    """Return the error for a loss of which some part had its backward pass before."""
    return StepError(
        f"the loss, or a part of it, has had its backward pass before. {_advice(source)}. "
        "If a tensor is kept from an earlier step, as the state of an RNN, detach() it"
    )


def _advice(source: StepSource) -> str:
    if source.returns_loss:
        return f"Try to {_RETURN_THE_LOSS}"
    return f"If {source.name} trains by itself, try return None; else {_RETURN_THE_LOSS}"
