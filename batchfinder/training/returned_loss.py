"""What a step or a loss function returned: a loss to train with, or something else."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from batchfinder.errors import StepError
from batchfinder.training.frameworks.lightning import own_training_step
from batchfinder.training.frameworks.transformers_trainer import TrainerStep
from batchfinder.training.setup import TrainingSetup

_RETURN_THE_LOSS = "return the loss before its backward pass: that and the optimizer step follow"
_OR_NONE = "; or let the step do all of it and return None"


def checked_loss(loss: Any, setup: TrainingSetup) -> Tensor:
    """A loss, if it is one.

    Args:
        loss: what was returned.
        setup: whose loss it is.

    Raises:
        StepError: it is no scalar that requires a gradient.
    """
    source = _source_of_loss(setup)
    if not isinstance(loss, Tensor):
        raise StepError(
            f"{source} gave {type(loss).__name__} as the loss, not a tensor; {_advice(setup)}"
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
            f"{f'; {_advice(setup)}' if setup.step else ''}"
        )
    return loss


def had_its_backward_pass(setup: TrainingSetup) -> StepError:
    """The error for a loss that comes when its backward pass is over."""
    return StepError(f"{_source_of_loss(setup)} ran the backward pass by itself: {_advice(setup)}")


def may_train_itself(setup: TrainingSetup) -> bool:
    """Whether None, where the step returns it, means that it has trained: a step of the user's."""
    ours = setup.step is own_training_step or isinstance(setup.step, TrainerStep)
    return setup.step is not None and not ours


def _advice(setup: TrainingSetup) -> str:
    return _RETURN_THE_LOSS + (_OR_NONE if may_train_itself(setup) else "")


def _source_of_loss(setup: TrainingSetup) -> str:
    if isinstance(setup.step, TrainerStep):
        return "compute_loss of the Trainer"
    if setup.step is own_training_step:
        return "training_step"
    return "step" if setup.step else "loss_fn" if setup.loss_fn else "the model"
