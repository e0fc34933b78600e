"""One training step as a training loop runs it: forward, loss, backward, optimizer step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from batchfinder.errors import StepError, UsageError
from batchfinder.training.modes.evaluation import Evaluation
from batchfinder.training.optimizer import StepsMade, make_optimizer, without_closure
from batchfinder.training.parallel import is_wrapped, parallelized, unwrapped
from batchfinder.training.placement import homes_of, move_beside, move_to_device
from batchfinder.training.setup import DTYPES, TrainingSetup
from batchfinder.training.state.reach import reachable
from batchfinder.training.step_source import (
    Kept,
    KeptUntil,
    OldOutput,
    checked_loss,
    had_its_backward_pass,
    remarks_on_compiling,
    source_of,
)
from batchfinder.training.tree import shapes_named


class TrainingStep:
    """The step of a setup on a device.

    It keeps alive what training keeps alive from step to step. In a plain loop at module level,
    ``for ...: batch = to(device); output = model(batch); loss = ...``, each variable holds its old
    value until it gets a new one. Frameworks release values earlier
    (:class:`~batchfinder.training.step_source.KeptUntil`).

    Args:
        setup: the setup to train. Its model moves to the device and into training mode.
        device: the device to train on.
        precision: ``"fp32"``, or ``"bf16"`` / ``"fp16"`` with autocast (fp16: and a GradScaler).
        compiled: run the model through ``torch.compile``.
        accumulate: train with gradient accumulation.
        batch_dim: the index of the batch dimension.
        strategy: ``"ddp"`` or ``"fsdp"``, together with the other ranks; None: alone.
        is_sharded: the caller has sharded the model, or will shard the optimizer.
        eval_batch_size: the number of examples in each batch of the validation after every step.
            Default: the framework's own, else no validation.

    Attributes:
        optimizer: the optimizer made from the setup, or the user's own.
        micro_batches: the number that a step needs to reach its peak memory: 2 with accumulation,
            because the gradients of the first are alive in the second.
        trains_itself: the user's step returned None, so it ran its own backward pass and optimizer.
        warnings: texts for the user, such as a warning about a NaN loss.
        keeps_gradients: the gradients of the last step live until the next backward pass.
        eval_batch_size: the examples in each batch of :meth:`validate`; None: no validation.
        eval_batches: makes the batches of :meth:`validate`; None: those of the training.
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
        eval_batch_size: int | None = None,
    ) -> None:
        if precision not in DTYPES:
            raise UsageError(f"precision is fp32, bf16 or fp16, not {precision!r}")
        # Sharding moves the model to the device itself, block by block, and casts by itself.
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
        self.optimizer = self._make_optimizer()
        self._source = source_of(setup, self._warn)
        self._source.train_with(self.optimizer)
        self.eval_batch_size = eval_batch_size or self._source.eval_batch_size
        self.eval_batches = self._source.eval_batches
        self._validates = bool(self.eval_batch_size)
        self.keeps_gradients = self._source.keeps_gradients
        self.micro_batches = 2 if accumulate or self._source.accumulates else 1
        self._ahead: list[Any] = []
        self.trains_itself = False
        self.warnings = remarks_on_compiling(self._source, compiled=compiled)
        in_autocast = precision == "bf16" and self._source.takes_bf16
        asked = {
            f"precision {precision}": precision != "fp32" and not in_autocast,
            "gradient accumulation": accumulate,
            "sharding": is_sharded or is_sharded_here,
        }
        self._added = [option for option, is_asked in asked.items() if is_asked]
        is_plain = is_sharded_here or precision == "fp32"
        self._autocast_dtype = None if is_plain else DTYPES[precision]
        # A scale of 1 keeps the first step from overflowing. An overflow would skip it, and the
        # optimizer would have no states. The scale changes no tensor's size.
        scaled = precision == "fp16" and not self._source.runs_backward
        self._scaler = torch.amp.GradScaler(device.type, init_scale=1.0) if scaled else None
        self._model: Any = torch.compile(model) if compiled else model
        # Not DistributedDataParallel: its ranks would wait for each other to sync buffers.
        self._evaluated_model: Any = self._model if compiled else unwrapped(model)
        self._evaluation = self._make_evaluation()
        self._kept = Kept()
        self._batch_size = 0
        self._old_output = OldOutput(device, batch_dim)
        self._stand_in: list[Tensor] | None = None
        for scaler in reachable(setup.functions):  # the user's own start at 1 too
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
                scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})
        self._has_old_gradients = False
        self._steps_made = StepsMade()

    @property
    def late_gradient_bytes(self) -> int:
        """Bytes of gradients that live on in a forward pass if a loop clears them after it.

        They are 0 if it is known when the loop clears them, as that of a Trainer.
        """
        is_known = self.keeps_gradients or self.trains_itself
        if is_known or self._source.kept_until is not KeptUntil.NEXT:
            return 0
        return sum(p.nbytes for p in self.setup.model.parameters() if p.requires_grad)

    def begin(self, batch_size: int, small_batch: Callable[[], Any], *, is_first: bool) -> None:
        """Prepare for steps at a batch size.

        Args:
            batch_size: the number of examples in each micro-batch.
            small_batch: fetches a batch to train on first, if the mode needs that.
            is_first: True if training starts here; False if the output of an earlier step is
                alive.
        """
        self._batch_size = batch_size
        if not is_first and self._source.kept_until is KeptUntil.NEXT:
            self._kept.output = self._stand_in = self._old_output.blocks(batch_size)

    def fetch(self, next_batch: Callable[[], Any]) -> Iterator[Any]:
        """Bring the micro-batches of one step to the device, as early as training does.

        Yields:
            Each micro-batch, after training on the one before it.
        """
        self._clear_old_gradients()
        if self._source.batches_ahead is None:
            for _ in range(self.micro_batches):
                if self._source.kept_until is KeptUntil.STEP:
                    self._kept = Kept()
                yield next_batch()
            return
        # The old micro-batches are released once all new ones are on the device.
        count = max(self.micro_batches, self._source.batches_ahead)
        self._ahead = [next_batch() for _ in range(count)]
        for place in range(self.micro_batches):
            yield self._ahead[place]

    def forward_backward(self, batch: Any, after_forward: Callable[[], Any] = lambda: None) -> None:
        """Run forward pass, loss and backward pass of one micro-batch on the device.

        ``after_forward`` is called between loss and backward pass, unless the step runs both.
        """
        loss = self.forward(batch)
        if loss is None:
            return
        after_forward()
        if self._has_old_gradients:
            self.optimizer.zero_grad(set_to_none=True)
            self._has_old_gradients = False
        try:
            torch.autograd.backward(self._scaler.scale(loss) if self._scaler else loss)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            raise had_its_backward_pass(self._source) from error
        if self._source.kept_until is KeptUntil.BACKWARD:
            self._kept = Kept(loss=loss.detach())

    def forward(self, batch: Any) -> Tensor | None:
        """Return the loss of one micro-batch on the device; None if its backward pass has run."""
        self._kept.batch = batch
        with self._autocast(), shapes_named(batch), self._steps_made.noted():
            self._kept.output = self._source(self._model, batch)
            self._stand_in = None
            self._kept.loss = self._source.loss_of(self._kept.output, batch)
        self.trains_itself = self._kept.loss is None and not self._source.returns_loss
        if self.trains_itself:
            self._check_alone()
        elif self._source.runs_backward:
            self._kept = Kept(loss=self._kept.loss)
        else:
            return checked_loss(self._kept.loss, self._source)
        return None

    def optimizer_step(self) -> None:
        """Update the parameters and clear the gradients, unless the step has done so itself."""
        if self.trains_itself:
            return
        with without_closure(self.optimizer), self._steps_made.noted():
            if self._scaler is None:
                self.optimizer.step()
            else:
                self._scaler.step(self.optimizer)
                self._scaler.update()
                if not self.optimizer.state:  # an overflow skipped it; later steps run
                    self.optimizer.step()
        if self.keeps_gradients:
            self._has_old_gradients = True
        elif not self._validates or self._source.clears_gradients:
            self.optimizer.zero_grad(set_to_none=True)

    def validate(self, next_batch: Callable[[], Any]) -> None:
        """Run the validation after the step, while everything that training keeps is alive.

        ``next_batch`` fetches one batch of ``eval_batch_size`` examples to the device.
        """
        with self._source.validation(self._evaluated_model):
            for batch in self._evaluation.fetch(next_batch):
                self._evaluation.forward(batch)
        if self._source.kept_until is not KeptUntil.NEXT:
            self._evaluation.release()

    def check_loss(self) -> None:
        """Warn if the last loss was not a number. Waits for the device."""
        loss = self._kept.loss
        if isinstance(loss, Tensor) and not math.isfinite(loss.item()):
            self._warn(
                f"the loss is {loss.item()} on the sample. The measured memory is valid, but check "
                "the model, its inputs or the precision before training"
            )

    def check_optimizers(self) -> None:
        """Warn about optimizers of another model, and about optimizers that made no step."""
        for remark in self._steps_made.remarks(self.setup):
            self._warn(remark)

    def release(self) -> None:
        """Release the batches, the output and the gradients of the last step."""
        if self._stand_in is None and self._kept.output is not None and self._batch_size:
            self._old_output.note(self._kept.output, self._batch_size)
        self._stand_in = None
        self._kept = Kept()
        self._ahead = []
        self._source.release()
        self._evaluation.release()
        self.optimizer.zero_grad(set_to_none=True)
        self._has_old_gradients = False

    def _clear_old_gradients(self) -> None:
        """Clear the gradients kept for a validation, as most loops do when a step begins."""
        if self._validates and not self.keeps_gradients and not self.trains_itself:
            self.optimizer.zero_grad(set_to_none=True)

    def _make_optimizer(self) -> Optimizer:
        return make_optimizer(self.setup.optimizer, self.setup.model)

    def _make_evaluation(self) -> Evaluation:
        return Evaluation(self._evaluated_model, self._source.evaluate, self._autocast)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)

    def _check_alone(self) -> None:
        """Refuse options that cannot be added to a step that trains by itself."""
        if self._added:
            raise StepError(
                f"step returned None, so it trains by itself; {self._added[0]} cannot be added "
                "from outside. Try without the option, and do it in the step or the target"
            )
        given = self.setup.optimizer
        if given is not None and not any(given is thing for thing in reachable([self.setup.step])):
            self._warn(
                "step returned None, so it trains by itself: the optimizer given is not used"
            )

    def _warn(self, warning: str) -> None:
        self.warnings += [warning] * (warning not in self.warnings)
