"""A LightningModule's steps as its Trainer runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from batchfinder.errors import SampleError, StepError
from batchfinder.integrations.lightning_data import Validation
from batchfinder.training.frameworks.lightning import takes_index
from batchfinder.training.modes.evaluation import BATCHES
from batchfinder.training.parallel import unwrapped
from batchfinder.training.sample import common_size
from batchfinder.training.setup import refused_call
from batchfinder.training.state.patching import replaced
from batchfinder.training.state.reach import reachable
from batchfinder.training.state.undo import contents_kept
from batchfinder.training.step_source import KeptUntil, StepSource, filled_block
from batchfinder.units import MIB

# The blocks that stand for the results of all batches of a validation.
MOST_BLOCKS = 64


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
            self._examples = validation.examples
        self._reached_bytes: list[int] = []  # after each batch of a validation
        self._kept_bytes = 0.0  # by each of its examples
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
        self._reached_bytes.append(_bytes_reached(unwrapped(model)))

    @contextlib.contextmanager
    def validation(self, model: nn.Module) -> Iterator[None]:
        """Hold what the steps of a whole validation keep, and drop it at its end.

        Steps keep predictions for ``on_validation_epoch_end``, or metrics do. Only the last batches
        run here. Blocks replace the results of all others.
        """
        module: Any = unwrapped(model)
        assert self.eval_batch_size
        others = max(0, self._examples - BATCHES * self.eval_batch_size)
        with contents_kept(reachable([module])):
            earlier = self._results(others, module.device)
            self._reached_bytes = []
            yield
            growth = max(0, self._reached_bytes[-1] - self._reached_bytes[-2])
            self._kept_bytes = growth / self.eval_batch_size
            del earlier

    def _results(self, examples: int, device: torch.device) -> list[Tensor]:
        """Allocate blocks for what the steps of a validation keep of these examples."""
        size = int(self._kept_bytes * examples)
        count = min(MOST_BLOCKS, examples // (self.eval_batch_size or 1))
        return [filled_block(size // count, device) for _ in range(count)] if size > MIB else []

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


def _bytes_reached(module: nn.Module) -> int:
    """Return the bytes of all tensors but parameters on a module's device, each storage once."""
    device = getattr(module, "device", None)
    found = [thing for thing in reachable([module]) if type(thing) is Tensor]
    storages = [
        tensor.untyped_storage()
        for tensor in found
        if tensor.device == device and tensor.layout is torch.strided
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _nothing(*_: Any, **__: Any) -> None:
    """Log nothing."""
