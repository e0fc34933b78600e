"""Steps without training: validation during a training, and inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from batchfinder.training.modes.evaluation import BATCHES, Evaluation
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.step import TrainingStep
from batchfinder.training.step_source import Kept

# The optimizer allocates its states in the first step, so only the gradients of the second are
# where those of a training are. After one step, a ResNet's 3318 and a ViT's 328 fitted beside them,
# and ran out of memory in a script (scripts/benchmarks/bench_first_validation.py).
SMALL_STEPS = 2


class EvalStep(TrainingStep):
    """Forward passes and losses of a validation during a training.

    The gradients and optimizer states of the training are on the device.
    """

    def __init__(self, setup: TrainingSetup, device: torch.device, **options: Any) -> None:
        super().__init__(setup, device, **options)
        self.micro_batches = BATCHES
        self.eval_batch_size = None
        self._validates = True
        self._trains = False

    def begin(self, batch_size: int, small_batch: Callable[[], Any], *, is_first: bool) -> None:
        """Train on small batches to allocate gradients, optimizer states and kernel workspaces."""
        for _ in range(SMALL_STEPS):
            self._clear_old_gradients()
            self._trains = True
            try:
                super().forward_backward(small_batch())
            finally:
                self._trains = False
            super().optimizer_step()
        self._kept = Kept()

    def fetch(self, next_batch: Callable[[], Any]) -> Iterator[Any]:
        """Bring the batches of two forward passes to the device, one after the other."""
        return self._evaluation.fetch(next_batch)

    def forward_backward(self, batch: Any, after_forward: Callable[[], Any] = lambda: None) -> None:
        """Run the forward pass of one batch on the device."""
        self._evaluation.forward(batch)
        after_forward()

    def forward(self, batch: Any) -> Tensor | None:
        """Run the forward pass of one batch on the device."""
        if self._trains:
            return super().forward(batch)
        self._evaluation.forward(batch)
        return None

    def optimizer_step(self) -> None:
        """Do nothing: nothing is trained."""

    check_loss = check_optimizers = optimizer_step


class InferenceStep(EvalStep):
    """Forward passes of the model alone: no loss, no gradients, no optimizer."""

    def begin(self, batch_size: int, small_batch: Callable[[], Any], *, is_first: bool) -> None:
        """Do nothing: nothing is trained."""

    def _make_optimizer(self) -> Optimizer:
        return SGD([nn.Parameter(torch.empty(0))])  # an optimizer of no weights

    def _make_evaluation(self) -> Evaluation:
        return Evaluation(self._evaluated_model, self._source.infer, self._autocast)


STEP_OF_MODE: dict[str, type[TrainingStep]] = {
    "train": TrainingStep,
    "eval": EvalStep,
    "inference": InferenceStep,
}
