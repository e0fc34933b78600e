"""How a LightningModule says that it is trained: by its own step and with its own optimizer.

Lightning is not imported; any module with these two methods is taken for one.

Sources: the documentation of ``LightningModule``
(https://lightning.ai/docs/pytorch/stable/common/lightning_module.html), and for the way through
``forward`` Lightning's own strategies, which call it so.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.optim import Optimizer

from batchfinder.errors import StepError
from batchfinder.training.parallel import is_wrapped, unwrapped


def trains_itself(model: nn.Module) -> bool:
    """Whether a module brings its own training step and optimizer.

    Example:
        >>> trains_itself(nn.Linear(4, 2))
        False
    """
    names = ("training_step", "configure_optimizers")
    return all(callable(getattr(model, name, None)) for name in names)


def own_training_step(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a LightningModule's ``training_step``, for the first batch of an epoch.

    Args:
        model: the module; also as DistributedDataParallel or ``fully_shard`` wrap it.
        batch: as the DataLoader yields it.

    Raises:
        StepError: the module optimizes by hand, or is compiled.
        Exception: what ``training_step`` raises, running out of memory included.
    """
    if isinstance(model, OptimizedModule):
        raise StepError(
            "torch.compile does not reach the training_step of a LightningModule; give a step that "
            "calls the model: TrainingSetup(model, sample, step=)"
        )
    module: Any = unwrapped(model)
    if getattr(module, "automatic_optimization", True) is False:
        raise StepError(
            "the LightningModule optimizes by hand (automatic_optimization is False); give the "
            "step and the optimizer: TrainingSetup(model, sample, step=, optimizer=)"
        )
    # The index of the batch is optional, as is that of the DataLoader.
    taken = len(inspect.signature(module.training_step).parameters)
    arguments = (batch, 0, 0)[:taken]
    if is_wrapped(model):
        output = _through_forward(model, module, arguments)
    else:
        output = module.training_step(*arguments)
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _through_forward(model: nn.Module, module: Any, arguments: tuple[Any, ...]) -> Any:
    """Call ``training_step`` in the place of ``forward``, around which wrappers do their work."""

    def redirected(*arguments: Any) -> Any:
        del module.forward  # the step itself may well call it
        return module.training_step(*arguments)

    module.forward = redirected
    try:
        return model(*arguments)
    finally:
        vars(module).pop("forward", None)


def own_optimizer(model: nn.Module) -> Optimizer:
    """The optimizer that a LightningModule configures; its schedulers are left alone.

    Raises:
        StepError: there is none, or more than one; or the module asks for its Trainer.
        Exception: what ``configure_optimizers`` raises.
    """
    module: Any = model
    try:
        configured = module.configure_optimizers()
    except RuntimeError as error:
        if "Trainer" not in str(error):
            raise
        raise StepError(
            "configure_optimizers of the LightningModule asks for its Trainer, which is not there "
            "yet; name the optimizer: --optimizer adamw, or optimizer= from Python"
        ) from error
    optimizers = list(_optimizers_in(configured))
    if len(optimizers) != 1:
        raise StepError(
            f"configure_optimizers of the LightningModule gave {len(optimizers)} optimizers; "
            "give one, and the step if there are several: "
            "TrainingSetup(model, sample, step=, optimizer=)"
        )
    return optimizers[0]


def _optimizers_in(configured: Any) -> Iterator[Optimizer]:
    """One; a list; a list beside one of schedulers; or a dict, or a list of dicts, with them."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield from _optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, (list, tuple)):
        for item in configured:
            yield from _optimizers_in(item)
