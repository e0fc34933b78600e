"""The step of a LightningModule with manual optimization, and the Trainer methods that it calls.

Lightning is not imported. Source: the documentation of manual optimization
(https://lightning.ai/docs/pytorch/stable/model/manual_optimization.html).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.training.frameworks.lightning import LightningStep, call_step, own_optimizers
from batchfinder.training.optimizer import parameters_of
from batchfinder.training.parallel import unwrapped
from batchfinder.training.state.patching import replaced


def optimizes_by_hand(model: nn.Module) -> bool:
    """Return True if a LightningModule sets ``automatic_optimization`` to False."""
    return getattr(unwrapped(model), "automatic_optimization", True) is False


class ManualStep(LightningStep):
    """A ``training_step`` that runs its own backward passes and optimizers.

    Args:
        configured: the optimizers and schedulers to train with; None: the module configures new
            ones.
    """

    returns_loss = False
    takes_bf16 = True  # Lightning runs the whole training_step under autocast

    def __init__(self, configured: tuple[list[Optimizer], list[Any]] | None = None) -> None:
        self._configured = configured

    def __call__(self, model: nn.Module, batch: Any) -> None:
        """Train on one batch that is on the model's device."""
        if self._configured is None:
            self._configured = own_optimizers(model)
        methods = _in_the_trainers_place(*self._configured)
        try:
            with replaced(unwrapped(model), **methods):
                call_step(model, batch)
        except BaseException:
            # Otherwise a size that ran out of memory would leave an optimizer's parameters frozen.
            methods["untoggle_optimizer"](None)
            raise


def _in_the_trainers_place(
    optimizers: list[Optimizer], schedulers: list[Any]
) -> dict[str, Callable[..., Any]]:
    """Return replacements for the methods of a LightningModule that need its Trainer."""
    trained: dict[Tensor, bool] = {}

    def configured_optimizers(use_pl_optimizer: bool = True) -> Any:
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers() -> Any:
        return schedulers[0] if len(schedulers) == 1 else schedulers or None

    def manual_backward(loss: Tensor, *arguments: Any, **options: Any) -> None:
        loss.backward(*arguments, **options)  # type: ignore[no-untyped-call]

    def toggle_optimizer(optimizer: Optimizer) -> None:
        trained.update({p: p.requires_grad for other in optimizers for p in parameters_of(other)})
        own = {*parameters_of(optimizer)}
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad and parameter in own)

    def untoggle_optimizer(optimizer: Optimizer) -> None:
        for parameter, requires_grad in trained.items():
            parameter.requires_grad_(requires_grad)
        trained.clear()

    def clip_gradients(
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if not gradient_clip_val:
            return
        by_value = gradient_clip_algorithm == "value"
        clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
        clip(parameters_of(optimizer), gradient_clip_val)

    return {
        "optimizers": configured_optimizers,
        "lr_schedulers": lr_schedulers,
        "manual_backward": manual_backward,
        "toggle_optimizer": toggle_optimizer,
        "untoggle_optimizer": untoggle_optimizer,
        "clip_gradients": clip_gradients,
    }
