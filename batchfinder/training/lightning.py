"""How a LightningModule says that it is trained: by its own step and with its own optimizer.

Lightning is not imported; any module with these two methods is taken for one.

Sources: the documentation of ``LightningModule``
(https://lightning.ai/docs/pytorch/stable/common/lightning_module.html), and for the way through
``forward`` Lightning's own strategies, which call it so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.optim import Optimizer

from batchfinder.errors import StepError
from batchfinder.training.forward import forward_replaced
from batchfinder.training.parallel import is_wrapped, unwrapped

_LIGHTNING = ("lightning", "pytorch_lightning")


def trains_itself(model: nn.Module) -> bool:
    """Whether a module, wrapped for data-parallel training or not, brings its step and optimizer.

    Example:
        >>> trains_itself(nn.Linear(4, 2))
        False
    """
    module = unwrapped(model)
    methods = [getattr(module, name, None) for name in ("training_step", "configure_optimizers")]
    # Those of the base class do nothing: then the user's loop trains the module.
    return all(
        callable(method) and method.__module__.partition(".")[0] not in _LIGHTNING
        for method in methods
    )


def own_training_step(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a LightningModule's ``training_step``, for the first batch of an epoch.

    Args:
        model: the module; also as DistributedDataParallel or ``fully_shard`` wrap it.
        batch: as the DataLoader yields it.

    Raises:
        StepError: the module optimizes by hand, is compiled, asks for its Trainer, or gives no
            loss.
        Exception: what ``training_step`` raises, running out of memory included.
    """
    module: Any = unwrapped(model)
    if isinstance(module, OptimizedModule):
        raise StepError(
            "torch.compile does not reach the training_step of a LightningModule; give a step that "
            "calls the model: TrainingSetup(model, sample, step=)"
        )
    if getattr(module, "automatic_optimization", True) is False:
        raise StepError(
            "the LightningModule optimizes by hand (automatic_optimization is False); give the "
            "step and the optimizer: TrainingSetup(model, sample, step=, optimizer=)"
        )
    arguments = (batch, 0) if _takes_index(module.training_step) else (batch,)
    with _explained("training_step", "give a step: TrainingSetup(model, sample, step=)"):
        if is_wrapped(model):
            output = _through_forward(model, module, arguments)
        else:
            output = module.training_step(*arguments)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise StepError(
            f"training_step of the LightningModule gave {type(output).__name__}"
            f"{' without a loss' if isinstance(output, Mapping) else ''}; it must return the loss, "
            'or a dict with "loss"'
        )
    return loss


def _takes_index(function: Callable[..., Any]) -> bool:
    """Whether a ``training_step`` takes the index of the batch beside the batch."""
    parameters = inspect.signature(function).parameters.values()
    kinds = [parameter.kind for parameter in parameters]
    positional = [k for k in kinds if k in (k.POSITIONAL_ONLY, k.POSITIONAL_OR_KEYWORD)]
    return len(positional) >= 2 or any(kind is kind.VAR_POSITIONAL for kind in kinds)


@contextmanager
def _explained(method: str, advice: str) -> Iterator[None]:
    """Say what to do where a method asks for the Trainer, which is not there yet."""
    try:
        yield
    except RuntimeError as error:
        if "not attached to a `Trainer`" not in str(error):
            raise
        raise StepError(
            f"{method} of the LightningModule asks for its Trainer, which is not there yet; "
            f"{advice}"
        ) from error


def _through_forward(model: nn.Module, module: Any, arguments: tuple[Any, ...]) -> Any:
    """Call ``training_step`` in the place of ``forward``, around which wrappers do their work."""

    def redirected(*arguments: Any) -> Any:
        put_back()  # the step itself may well call it
        return module.training_step(*arguments)

    with forward_replaced(module, redirected) as put_back:
        return model(*arguments)


def own_optimizer(model: nn.Module) -> Optimizer:
    """The optimizer that a LightningModule configures; its schedulers are left alone.

    Raises:
        StepError: there is none, or more than one; or the module asks for its Trainer.
        Exception: what ``configure_optimizers`` raises.
    """
    module: Any = unwrapped(model)
    with _explained(
        "configure_optimizers", "name the optimizer: --optimizer adamw, or optimizer= from Python"
    ):
        configured = module.configure_optimizers()
    optimizers = list(_optimizers_in(configured))
    if not optimizers:
        raise StepError(
            "configure_optimizers of the LightningModule gave no optimizer; name one: --optimizer "
            "adamw, or optimizer= from Python"
        )
    if len(optimizers) > 1:
        raise StepError(
            f"configure_optimizers of the LightningModule gave {len(optimizers)} optimizers; give "
            "the step and one optimizer: TrainingSetup(model, sample, step=, optimizer=)"
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
