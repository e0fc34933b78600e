"""Train a LightningModule by its own step, with its own optimizer and data.

Lightning is not imported. Any module with ``training_step`` and ``configure_optimizers`` counts.

Sources: the documentation of ``LightningModule``
(https://lightning.ai/docs/pytorch/stable/common/lightning_module.html), and Lightning's strategies,
which also call ``training_step`` through ``forward``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from batchfinder.errors import StepError
from batchfinder.training.calling import call_model
from batchfinder.training.data.drawn import DataBatches
from batchfinder.training.data.loader import batches_of_loader
from batchfinder.training.parallel import is_compiled, is_wrapped, unwrapped
from batchfinder.training.setup import refused_call
from batchfinder.training.state.patching import replaced
from batchfinder.training.step_source import KeptUntil, StepSource
from batchfinder.training.user_traceback import error_line

_LIGHTNING = ("lightning", "pytorch_lightning")

# The batches of which a training_step may skip all but the last one, by returning None. Skipping
# more would show nothing new: only a counter or the batch's index can make a step train later.
BATCHES = 10


def is_lightning_module(model: nn.Module) -> bool:
    """Return True if a module, also in a data-parallel wrapper, has its own step and optimizer."""
    module = unwrapped(model)
    names = ("training_step", "configure_optimizers")
    return all(_is_own(getattr(module, name, None)) for name in names)


def _is_own(method: Any) -> bool:
    """Return True if a method is the user's. The methods of the base class do nothing."""
    return callable(method) and method.__module__.partition(".")[0] not in _LIGHTNING


class LightningStep(StepSource):
    """A step of a LightningModule, which may have a ``validation_step`` too."""

    name = "training_step"
    kept_until = KeptUntil.STEP

    def evaluate(self, model: nn.Module, batch: Any) -> Any:
        """Return the result of ``validation_step``, or of the forward pass if there is none."""
        has_own = _is_own(getattr(unwrapped(model), "validation_step", None))
        return call_step(model, batch, "validation_step") if has_own else call_model(model, batch)


class OwnTrainingStep(LightningStep):
    """A LightningModule's ``training_step``, as Lightning's automatic optimization runs it.

    Lightning keeps gradients until the next backward pass. It keeps the batch and the result of a
    step until the optimizer has stepped. Sources: ``Closure`` in
    lightning/pytorch/loops/optimization/automatic.py, ``advance`` in
    lightning/pytorch/loops/training_epoch_loop.py.
    """

    keeps_gradients = True

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return the result of ``training_step`` for the first batch that it does not skip."""
        steps = (call_step(model, batch, index=index) for index in range(BATCHES))
        return next((output for output in steps if output is not None), None)

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """Return the loss: the output itself, or ``output["loss"]``."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise StepError(
                f"training_step of the LightningModule gave {type(output).__name__}"
                f"{' without a loss' if isinstance(output, Mapping) else ''}. Return the loss, "
                'or a dict with "loss"'
            )
        return loss


def call_step(
    model: nn.Module, batch: Any, method: str = "training_step", *, index: int = 0
) -> Any:
    """Call a LightningModule's step, which may be wrapped, on a batch as that of an index."""
    module: Any = unwrapped(model)
    if is_compiled(module):
        raise StepError(
            "torch.compile does not reach the training_step of a LightningModule; give a step that "
            "calls the model: TrainingSetup(model, sample, step=)"
        )
    function = getattr(module, method)
    arguments = (batch, index) if takes_index(function) else (batch,)
    with _explained(method, "give a step: TrainingSetup(model, sample, step=)"):
        if is_wrapped(model):
            return _through_forward(model, module, function, arguments)
        return function(*arguments)


def takes_index(function: Callable[..., Any]) -> bool:
    """Return True if a ``training_step`` takes the index of the batch after the batch."""
    return not refused_call(function, ("batch", 0), {})


@contextmanager
def _explained(method: str, advice: str) -> Iterator[None]:
    """Give advice if a method fails because it asks for the Trainer, which does not exist yet."""
    try:
        yield
    except RuntimeError as error:
        if "not attached to a `Trainer`" not in str(error):
            raise
        raise StepError(
            f"{method} of the LightningModule asks for its Trainer, which is not there yet; "
            f"{advice}"
        ) from error


def _through_forward(
    model: nn.Module, module: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Call a function in place of ``forward``, so that wrappers around ``forward`` run."""

    def redirected(*arguments: Any) -> Any:
        put_back()  # the step itself may call forward
        return function(*arguments)

    with replaced(module, forward=redirected) as put_back:
        return model(*arguments)


def batches_of_module(model: nn.Module, warn: Callable[[str], None]) -> DataBatches | None:
    """Choose batches of a LightningModule's own ``train_dataloader``, if it has one that works."""
    module: Any = unwrapped(model)
    method: Any = getattr(module, "train_dataloader", None)
    if not _is_own(method):
        return None
    try:
        loader = method()
    except Exception as error:  # noqa: BLE001 - usually the data is not prepared yet
        warn(
            "train_dataloader of the LightningModule failed before training "
            f"({error_line(error)}), so its data is not used; give --loader FILE.py:FUNCTION "
            "(from Python: loader)"
        )
        return None
    return batches_of_loader(loader, "train_dataloader of the LightningModule")


def own_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer that a LightningModule configures. Its schedulers are ignored."""
    optimizers, _ = own_optimizers(model)
    if len(optimizers) > 1:
        raise StepError(
            f"configure_optimizers of the LightningModule gave {len(optimizers)} optimizers; give "
            "the step and one optimizer: TrainingSetup(model, sample, step=, optimizer=)"
        )
    return optimizers[0]


def own_optimizers(model: nn.Module) -> tuple[list[Optimizer], list[Any]]:
    """Return the optimizers and the schedulers that a LightningModule configures."""
    module: Any = unwrapped(model)
    with _explained(
        "configure_optimizers", "name the optimizer: --optimizer adamw, or optimizer= from Python"
    ):
        configured = module.configure_optimizers()
    parts = [*_configured(configured)]
    optimizers = [part for part in parts if isinstance(part, Optimizer)]
    if not optimizers:
        raise StepError(
            "configure_optimizers of the LightningModule gave no optimizer; name one: --optimizer "
            "adamw, or optimizer= from Python"
        )
    return optimizers, [part for part in parts if not isinstance(part, Optimizer)]


def _configured(parts: Any) -> Iterator[Any]:
    """Yield the optimizers and schedulers in a result of ``configure_optimizers``.

    The result is an optimizer, a dict, a list of either, or a list of optimizers and a list of
    schedulers.
    """
    if isinstance(parts, Optimizer | LRScheduler):
        yield parts
    elif isinstance(parts, Mapping):
        for name in ("optimizer", "lr_scheduler", "scheduler"):
            yield from _configured(parts.get(name))
    elif isinstance(parts, (list, tuple)):
        for part in parts:
            yield from _configured(part)
