"""One training step as a training loop runs it: forward, loss, backward, optimizer step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from batchfinder.errors import StepError, UsageError
from batchfinder.training.frameworks.lightning import own_training_step
from batchfinder.training.frameworks.manual_optimization import ManualStep
from batchfinder.training.frameworks.transformers_trainer import TrainerStep
from batchfinder.training.loss import call_loss, call_model, default_loss
from batchfinder.training.optimizer import make_optimizer
from batchfinder.training.parallel import is_wrapped, parallelized
from batchfinder.training.placement import homes_of, move_beside, move_to_device
from batchfinder.training.returned_loss import (
    checked_loss,
    had_its_backward_pass,
    may_train_itself,
)
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state.reach import reachable
from batchfinder.training.tree import named_tensors

AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str) -> None:
    """Raise a UsageError unless the precision is fp32, bf16 or fp16."""
    if precision not in AUTOCAST_DTYPES:
        raise UsageError(f"precision is fp32, bf16 or fp16, not {precision!r}")


class TrainingStep:
    """The step of a setup on a device.

    What the variables of an ordinary loop keep alive is kept alive here too: the previous batch
    until the next one has been moved to the device, the previous output until the next forward
    pass has returned.

    Args:
        setup: what to train. Its model is brought to the device and into training mode.
        device: where to train.
        precision: ``"fp32"``, or ``"bf16"`` / ``"fp16"`` with autocast (fp16: and a GradScaler).
        compiled: run the model through ``torch.compile`` with a dynamic batch dimension.
        accumulate: train with gradient accumulation.
        batch_dim: the index of the batch dimension.
        strategy: ``"ddp"`` or ``"fsdp"``, together with the other ranks; None: alone.
        is_sharded: whether somebody else has sharded the model, or will shard the optimizer.

    Attributes:
        optimizer: made from the setup, or the user's own.
        micro_batches: how many make a step that shows the peak: with accumulation 2, as the
            gradients of the first are alive in the second.
        trains_itself: whether the user's step has returned None: then it has run its own backward
            pass and optimizer.
        warnings: what the user should know of the step, such as a NaN loss.
        keeps_gradients: whether those of the last step are there until the next backward pass, as
            Lightning's Trainer keeps them, in place of none during the forward pass.

    Raises:
        StepError: the model has nothing to train, or is on the meta device.
        UsageError: the optimizer or the precision is unknown.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        device: torch.device,
        *,
        precision: str = "fp32",
        compiled: bool = False,
        accumulate: bool = False,
        batch_dim: int = 0,
        strategy: str | None = None,
        is_sharded: bool = False,
    ) -> None:
        check_precision(precision)
        # Sharding brings the model to the device itself, block by block, and casts by itself.
        is_sharded_here = strategy == "fsdp" and not is_wrapped(setup.model)
        if is_sharded_here:
            move_beside(setup, device, homes_of(setup.model))
        else:
            move_to_device(setup, device)
        model = setup.model
        if strategy is not None:
            model = parallelized(setup, strategy, device, precision)
            move_to_device(setup, device)
        self.setup = setup
        self.device = device
        self.optimizer = make_optimizer(setup.optimizer, setup.model)
        of_trainer = setup.step if isinstance(setup.step, TrainerStep) else None
        accumulates = accumulate or (of_trainer is not None and of_trainer.accumulates)
        self.micro_batches = 2 if accumulates else 1
        self._batches_ahead = of_trainer.batches_ahead if of_trainer else None
        self._ahead: list[Any] = []
        self.trains_itself = False
        self.warnings: list[str] = []
        # What a step that trains by itself has to do by itself; Lightning runs one in autocast.
        in_autocast = precision == "bf16" and isinstance(setup.step, ManualStep)
        asked = {
            f"precision {precision}": precision != "fp32" and not in_autocast,
            "gradient accumulation": accumulate,
            "sharding": is_sharded or is_sharded_here,
        }
        self._added = [option for option, is_asked in asked.items() if is_asked]
        self._autocast_dtype = None if is_sharded_here else AUTOCAST_DTYPES[precision]
        # From a scale of 1 no first step overflows and is skipped, which would leave the
        # optimizer without its states. The scale changes no tensor's size.
        self._scaler = (
            torch.amp.GradScaler(device.type, init_scale=1.0) if precision == "fp16" else None
        )
        self._compiled = compiled
        self._batch_dim = batch_dim
        self._model: Any = torch.compile(model) if compiled else model
        self._kept: list[Any] = []
        for scaler in reachable(setup.functions):  # of the user's own: likewise from a scale of 1
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
                scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})
        self.keeps_gradients = setup.step is own_training_step
        self._has_old_gradients = False

    def fetch(self, next_batch: Callable[[], Any]) -> Iterator[Any]:
        """The micro-batches of one step, on the device as early and as long as in training.

        Args:
            next_batch: fetches one micro-batch to the device.

        Yields:
            Each micro-batch when the one before it has been trained on.
        """
        if self._batches_ahead is None:
            for _ in range(self.micro_batches):
                yield next_batch()
            return
        # The last ones go when all of the next are there; and no output is kept.
        self._ahead = [next_batch() for _ in range(max(self.micro_batches, self._batches_ahead))]
        for place in range(self.micro_batches):
            self._kept = [None, *self._kept[-1:]]
            yield self._ahead[place]

    def forward_backward(self, batch: Any, after_forward: Callable[[], Any] = lambda: None) -> None:
        """Forward pass, loss and backward pass of one micro-batch on the device.

        Args:
            batch: the micro-batch.
            after_forward: called when the loss is there, before the backward pass; not at all where
                the step trains by itself.

        Raises:
            StepError: the loss is no scalar that requires a gradient, or had its backward pass.
            Exception: what the model raises, running out of memory included.
        """
        loss = self.forward(batch)
        if loss is None:
            return
        after_forward()
        if self._has_old_gradients:
            self.optimizer.zero_grad(set_to_none=True)
            self._has_old_gradients = False
        try:
            torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise had_its_backward_pass(self.setup) from error

    def forward(self, batch: Any) -> Tensor | None:
        """Forward pass and loss of one micro-batch on the device.

        Returns:
            The loss; None if the step has trained by itself.

        Raises:
            as :meth:`forward_backward`.
        """
        if self._compiled:
            for _, tensor in named_tensors(batch):
                if tensor.dim() > self._batch_dim:
                    torch._dynamo.maybe_mark_dynamic(tensor, self._batch_dim)
        self._kept[:1] = [batch]
        with self._autocast():
            output, loss = self._forward(batch)
        self._kept = [batch, output, loss]
        self.trains_itself = loss is None and may_train_itself(self.setup)
        if self.trains_itself:
            self._check_alone()
            return None
        return checked_loss(loss, self.setup)

    def optimizer_step(self) -> None:
        """Update the parameters, then clear the gradients, unless they are kept for a while.

        Nothing is left to do where the step trains by itself.
        """
        if self.trains_itself:
            return
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
            if not self.optimizer.state:
                # Gradients overflowed all the same and the step was skipped. Later ones will not
                # be, and what they allocate has to be seen.
                self.optimizer.step()
        if self.keeps_gradients:
            self._has_old_gradients = True
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def check_loss(self) -> None:
        """Warn if the last loss was not a number. Waits for the device."""
        loss = self._kept[-1] if self._kept else None
        if isinstance(loss, Tensor) and not math.isfinite(loss.item()):
            self._warn(
                f"the loss is {loss.item()} on the sample: memory is measured all the same, but "
                "look at the model, its inputs or the precision before training"
            )

    def check_optimizers(self) -> None:
        """Warn of optimizers that train something else, or that have not made a step."""
        given = self.setup.optimizer
        if isinstance(given, Optimizer) and not _trains(given, self.setup.model):
            self._warn(
                f"the optimizer, {type(given).__name__}, holds no parameter of the model: it "
                "trains another one; make it of model.parameters()"
            )
        for optimizer in reachable(self.setup.functions):
            if not isinstance(optimizer, Optimizer):
                continue
            is_plain = isinstance(optimizer, SGD) and not optimizer.defaults["momentum"]
            if not optimizer.state and not is_plain:
                self._warn(
                    f"{type(optimizer).__name__}, which the step reaches, has not made a step: the "
                    "memory of its states is not counted; let every training step end with it"
                )

    def release(self) -> None:
        """Let go of the batches, the output and the gradients of the last step."""
        self._kept = []
        self._ahead = []
        self.optimizer.zero_grad(set_to_none=True)
        self._has_old_gradients = False

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)

    def _forward(self, batch: Any) -> tuple[Any, Tensor | None]:
        if self.setup.step is not None:
            return None, self.setup.step(self._model, batch)
        output = call_model(self._model, batch)
        if self.setup.loss_fn is not None:
            return output, call_loss(self.setup.loss_fn, output, batch)
        loss, warning = default_loss(output, batch)
        if warning:
            self._warn(warning)
        return output, loss

    def _check_alone(self) -> None:
        """Say what a step that trains by itself makes of the options, or refuse them."""
        if self._added:
            raise StepError(
                f"step returned None, as it trains by itself; {self._added[0]} cannot be added "
                "from outside: leave the option away, and let the step and the target do it"
            )
        given = self.setup.optimizer
        if given is not None and not any(given is thing for thing in reachable([self.setup.step])):
            self._warn(
                "step returned None, as it trains by itself: the optimizer given is not used"
            )

    def _warn(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)


def _trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer holds any parameter of a model."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(parameter) in held for parameter in model.parameters())
