"""One training step as a training loop runs it: forward, loss, backward, optimizer step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.errors import StepError, UsageError
from batchfinder.training.lightning import own_training_step
from batchfinder.training.loss import call_model, default_loss
from batchfinder.training.optimizers import make_optimizer
from batchfinder.training.parallel import is_wrapped, parallelized
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.transformers_trainer import TrainerStep
from batchfinder.training.tree import named_tensors

_RETURN_THE_LOSS = "return the loss before its backward pass: that and the optimizer step follow"

AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str) -> None:
    """Raise a UsageError unless the precision is fp32, bf16 or fp16."""
    if precision not in AUTOCAST_DTYPES:
        raise UsageError(f"precision is fp32, bf16 or fp16, not {precision!r}")


def move_to_device(setup: TrainingSetup, device: torch.device) -> None:
    """Bring the model to a device, in place, and after it a loss module and an optimizer's states.

    A loss module may have weights of its own, those of the classes in a cross-entropy, say.

    Raises:
        StepError: the model is on the meta device.
    """
    for module in (setup.model, setup.loss_fn):
        if not isinstance(module, nn.Module):
            continue
        tensors = [*module.parameters(), *module.buffers()]
        if device.type != "meta" and any(tensor.is_meta for tensor in tensors):
            raise StepError(
                "the model is on the meta device and has no values to train with: build it without "
                'torch.device("meta"), or end its function with model.to_empty(device="cpu"); '
                "`batchfinder estimate` takes it as it is"
            )
        # A model that is there already stays untouched: fake tensors, for one, cannot be moved.
        if any(tensor.device != device for tensor in tensors):
            module.to(device)
        if not module.training:
            module.train()
    if isinstance(setup.optimizer, Optimizer):
        _move_optimizer(setup.optimizer, device)


def _move_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    for group in optimizer.param_groups:
        # Adam's step counters stay on the host, unless a kernel on the device reads them.
        counts_on_host = not (group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and not (name == "step" and counts_on_host):
                    state[name] = value.to(device)


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

    Attributes:
        optimizer: made from the setup, or the user's own.
        micro_batches: how many make a step that shows the peak: with accumulation 2, as the
            gradients of the first are alive in the second.
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
    ) -> None:
        check_precision(precision)
        # Sharding brings the model to the device itself, block by block, and casts by itself.
        is_sharded_here = strategy == "fsdp" and not is_wrapped(setup.model)
        if not is_sharded_here:
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
        self.warnings: list[str] = []
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
            self._kept = self._kept[-1:]
            yield self._ahead[place]

    def forward_backward(self, batch: Any, after_forward: Callable[[], Any] = lambda: None) -> None:
        """Forward pass, loss and backward pass of one micro-batch on the device.

        Args:
            batch: the micro-batch.
            after_forward: called when the loss is there, before the backward pass.

        Raises:
            StepError: the loss is no scalar that requires a gradient, or had its backward pass.
            Exception: what the model raises, running out of memory included.
        """
        loss = self.forward(batch)
        after_forward()
        if self._has_old_gradients:
            self.optimizer.zero_grad(set_to_none=True)
            self._has_old_gradients = False
        try:
            torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise StepError(
                f"{self._source_of_loss()} ran the backward pass by itself: {_RETURN_THE_LOSS}"
            ) from error

    def forward(self, batch: Any) -> Tensor:
        """Forward pass and loss of one micro-batch on the device.

        Raises:
            as :meth:`forward_backward`.
        """
        if self._compiled:
            for _, tensor in named_tensors(batch):
                if tensor.dim() > self._batch_dim:
                    torch._dynamo.maybe_mark_dynamic(tensor, self._batch_dim)
        with self._autocast():
            output, loss = self._forward(batch)
        self._kept = [batch, output, loss]
        self._check(loss)
        return loss

    def optimizer_step(self) -> None:
        """Update the parameters, then clear the gradients, unless they are kept for a while."""
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

    def _forward(self, batch: Any) -> tuple[Any, Tensor]:
        if self.setup.step is not None:
            return None, self.setup.step(self._model, batch)
        output = call_model(self._model, batch)
        if self.setup.loss_fn is not None:
            return output, self.setup.loss_fn(output, batch)
        loss, warning = default_loss(output, batch)
        if warning:
            self._warn(warning)
        return output, loss

    def _check(self, loss: Any) -> None:
        source = self._source_of_loss()
        if not isinstance(loss, Tensor):
            raise StepError(
                f"{source} gave {type(loss).__name__} as the loss, not a tensor; {_RETURN_THE_LOSS}"
            )
        if loss.numel() != 1:
            raise StepError(
                f"{source} gave a loss of shape {tuple(loss.shape)}; reduce it to one number, "
                "with .mean() for example"
            )
        if not loss.requires_grad:
            raise StepError(
                "the loss does not depend on any parameter that requires a gradient: nothing to "
                "train; look for torch.no_grad(), detach() or frozen parameters"
                f"{f'; {_RETURN_THE_LOSS}' if self.setup.step else ''}"
            )

    def _source_of_loss(self) -> str:
        if isinstance(self.setup.step, TrainerStep):
            return "compute_loss of the Trainer"
        if self.setup.step is own_training_step:
            return "training_step"
        return "step" if self.setup.step else "loss_fn" if self.setup.loss_fn else "the model"

    def _warn(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)
