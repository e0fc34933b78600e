"""A LightningModule's steps as its Trainer runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from batchfinder.errors import SampleError, StepError
from batchfinder.integrations.lightning_data import Validation
from batchfinder.training.frameworks.lightning import takes_index
from batchfinder.training.parallel import unwrapped
from batchfinder.training.sample import common_size
from batchfinder.training.setup import refused_call
from batchfinder.training.source import KeptUntil, StepSource
from batchfinder.training.state.patching import replaced
from batchfinder.training.state.reach import reachable
from batchfinder.training.state.undo import contents_kept


class StepInTrainer(StepSource):
    """A step as its Trainer runs it, with its precision and batch transfer, but without its logs.

    Logging would count the search's steps. It may also synchronize ranks, for which a rank that has
    run out of memory would be missing.

    Args:
        step: the module's step.
        trainer: the Trainer, in ``fit``, ``validate``, ``test`` or ``predict``.
        note_size: called with the batch size before each step.
        validation: the validation that is part of this training, if any.
    """

    def __init__(
        self,
        step: StepSource,
        trainer: Any,
        note_size: Callable[[int], None],
        validation: Validation | None = None,
    ) -> None:
        self._step, self._trainer, self._note_size = step, trainer, note_size
        if validation is not None:
            self.eval_batch_size, self.eval_batches = validation.batch_size, validation.batches
            self._validation_arguments = validation.arguments
        self.name = step.name
        self.keeps_gradients = step.keeps_gradients
        self.returns_loss = step.returns_loss
        self.kept_until = step.kept_until

    def __deepcopy__(self, memo: dict[int, Any]) -> StepInTrainer:
        """Refuse: a copy would copy the Trainer, with its loaders and loggers.

        Raises:
            StepError: always.
        """
        raise StepError("a step in its Trainer is not copied")

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Run the step on a batch that is on the module's device."""
        with contextlib.suppress(SampleError):  # batches of make_batch may have no common size
            self._note_size(common_size(batch, 0))
        return self._in_trainer(model, batch, partial(self._step, model))

    def evaluate(self, model: nn.Module, batch: Any) -> None:
        """Run ``validation_step``. The Trainer does not keep its result."""
        step: Any = unwrapped(model).validation_step
        more = self._validation_arguments
        if refused_call(step, (batch, *more), {}):  # it does not take the index of the batch
            more = more[1:]
        self._in_trainer(model, batch, lambda batch: step(batch, *more))

    def validation(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Drop what the steps of a validation have kept, as ``on_validation_epoch_end`` does."""
        return contents_kept(reachable([unwrapped(model)]))

    def _in_trainer(self, model: nn.Module, batch: Any, run: Callable[[Any], Any]) -> Any:
        module: Any = unwrapped(model)
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        precision = self._trainer.precision_plugin.forward_context()
        with precision, replaced(module, log=_nothing, log_dict=_nothing):
            return run(batch)

    def loss_of(self, output: Any, batch: Any) -> Any:
        """Return the loss of the output; None if the step trains by itself, or evaluates."""
        return self._step.loss_of(output, batch)


class EvaluationStep(StepSource):
    """A module's ``validation_step``, ``test_step`` or ``predict_step``, without gradients.

    Attributes:
        optimizer: an optimizer that is never used, because a search needs one.
    """

    returns_loss = False
    kept_until = KeptUntil.STEP

    def __init__(self, module: nn.Module, stage: str) -> None:
        self.name = "validation_step" if stage == "validate" else f"{stage}_step"
        self.optimizer = SGD([*module.parameters()] or [torch.zeros(1)], lr=0.0)

    def __call__(self, model: nn.Module, batch: Any) -> None:
        """Run the step in evaluation mode."""
        module = unwrapped(model).eval()
        step = getattr(module, self.name)
        with torch.no_grad():
            step(batch, 0) if takes_index(step) else step(batch)


def _nothing(*_: Any, **__: Any) -> None:
    """Log nothing."""
