"""Steps without training: validation beside the states of a training, and inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer, SparseAdam

from batchfinder.training.modes.evaluation import BATCHES, Evaluation
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state.reach import reachable
from batchfinder.training.step import TrainingStep


class EvalStep(TrainingStep):
    """Forward passes and losses of a validation, while a training waits for its end.

    Gradients and optimizer states are on the device, as training leaves them.
    """

    def __init__(self, setup: TrainingSetup, device: torch.device, **options: Any) -> None:
        super().__init__(setup, device, **options)
        self.micro_batches = BATCHES
        self.eval_batch_size = None
        self._evaluation = self._make_evaluation()
        self._has_states = False

    def begin(self, batch_size: int, *, is_first: bool) -> None:
        """Put the states of a training on the device."""
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and parameter.grad is None:
                        parameter.grad = _no_gradient(parameter, optimizer)
            if not self._has_states:
                optimizer.step()
            if self._source.clears_gradients:
                optimizer.zero_grad(set_to_none=True)
        self._has_states = True

    def fetch(self, next_batch: Callable[[], Any]) -> Iterator[Any]:
        """Bring the batches of two forward passes to the device, one after the other."""
        yield from self._evaluation.fetch(next_batch)

    def forward_backward(self, batch: Any, after_forward: Callable[[], Any] = lambda: None) -> None:
        """Run the forward pass of one batch on the device."""
        self._evaluation.forward(batch)
        after_forward()

    def forward(self, batch: Any) -> None:
        """Run the forward pass of one batch on the device."""
        self._evaluation.forward(batch)

    def optimizer_step(self) -> None:
        """Do nothing: nothing is trained."""

    def check_loss(self) -> None:
        """Do nothing: nothing is trained."""

    def check_optimizers(self) -> None:
        """Do nothing: nothing is trained."""

    def release(self) -> None:
        """Let go of the last batch and its output, and of gradients."""
        self._evaluation.release()
        for optimizer in self._optimizers():
            optimizer.zero_grad(set_to_none=True)

    def _optimizers(self) -> list[Optimizer]:
        """Return those that train: the user's step may have its own."""
        things = [*reachable(self.setup.functions)]
        reached = [thing for thing in things if isinstance(thing, Optimizer)]
        is_own = reached and self.setup.optimizer is None
        return reached if is_own else list(dict.fromkeys([self.optimizer, *reached]))


class InferenceStep(EvalStep):
    """Forward passes of the model alone: no loss, no gradients, no optimizer."""

    def _make_optimizer(self) -> Optimizer:
        return SGD([nn.Parameter(torch.empty(0))])  # of nothing

    def _make_evaluation(self) -> Evaluation:
        return Evaluation(self._evaluated_model, self._source.infer, self._autocast)

    def _optimizers(self) -> list[Optimizer]:
        return []


STEP_OF_MODE: dict[str, type[TrainingStep]] = {
    "train": TrainingStep,
    "eval": EvalStep,
    "inference": InferenceStep,
}


def _no_gradient(parameter: torch.Tensor, optimizer: Optimizer) -> torch.Tensor:
    """Return a gradient of zeros, of the layout that the optimizer takes."""
    if isinstance(optimizer, SparseAdam):
        return torch.zeros(parameter.shape, layout=torch.sparse_coo, device=parameter.device)
    return torch.zeros_like(parameter)
