"""Make an optimizer over the model's parameters from a name, a factory or an instance."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from traceback import extract_tb
from typing import Any
from weakref import WeakSet

import torch
import torch._dynamo  # the first optimizer imports it, possibly under a memory limit
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchfinder.errors import StepError, UsageError, did_you_mean
from batchfinder.training.setup import OptimizerOfModel, OptimizerSpec, TrainingSetup
from batchfinder.training.state.reach import reachable

DEFAULT_OPTIMIZER = "adamw"
FUSED = "adamw-fused"
"""AdamW in one kernel, without temporaries as large as the parameters."""


def optimizer_names() -> dict[str, type[Optimizer]]:
    """Return the ``torch.optim`` classes that plain training steps can use, by lower-case name."""
    return {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls)
        and issubclass(cls, Optimizer)
        # Optimizer is the base class. The step of LBFGS needs a closure that recomputes the loss.
        and name not in ("Optimizer", "LBFGS")
    }


def find_optimizer(name: str) -> Callable[..., Optimizer]:
    """Return the class of ``torch.optim`` with this name; upper and lower case are the same.

    A Trainer's name of AdamW or of an optimizer of bitsandbytes, such as adamw_torch_fused or
    adamw_8bit, is accepted too.
    """
    known = optimizer_names()
    plain = name.lower().replace("adamw_torch", "adamw")
    if plain in known:
        return known[plain]
    if plain.replace("_", "-") == FUSED:
        return functools.partial(torch.optim.AdamW, fused=True)
    if name.lower() == "lbfgs":
        raise UsageError(
            "LBFGS computes the loss several times a step, so no plain training step can use it; "
            "take another class of torch.optim"
        )
    quantized = _of_bitsandbytes(name)
    if quantized is not None:
        return quantized
    hint = did_you_mean(name.lower(), known, otherwise=f"; there are {', '.join(sorted(known))}")
    raise UsageError(f"there is no optimizer {name!r} in torch.optim{hint}")


def _of_bitsandbytes(name: str) -> type[Optimizer] | None:
    """Return the class for a Trainer's name, such as paged_adamw_8bit; None for other names."""
    key = name.lower().replace("_", "")
    if not key.startswith("paged") and not key.endswith("bit"):
        return None
    try:
        library = import_module("bitsandbytes.optim")
    except ImportError as error:
        raise UsageError(f"{name} needs bitsandbytes. Try pip install bitsandbytes.") from error
    return next((cls for known, cls in vars(library).items() if known.lower() == key), None)


def make_optimizer(spec: OptimizerSpec | None, model: nn.Module) -> Optimizer:
    """Make an optimizer over the model's trainable parameters.

    An instance is returned unchanged, a factory is called with the parameters, and None stands for
    AdamW with its default settings.
    """
    if isinstance(spec, Optimizer):
        return spec
    factory: Callable[..., Any]
    if spec is None or isinstance(spec, str):
        factory = find_optimizer(spec or DEFAULT_OPTIMIZER)
    elif callable(spec):
        factory = spec
    elif not isinstance(spec, OptimizerOfModel):
        raise UsageError(
            f"an object of type {type(spec).__name__} is no optimizer; give the name of one, as "
            "adamw, a torch.optim.Optimizer, or a function that makes one of the parameters. With "
            "several optimizers, try step(model, batch), which uses them all and returns None"
        )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise StepError(
            "the model has no parameter that requires a gradient: nothing to train; "
            "call requires_grad_() on what you want to train"
        )
    if isinstance(spec, OptimizerOfModel):
        return spec.make(model)
    optimizer = factory(parameters)
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise StepError(f"the optimizer factory returned {kind}, not a torch.optim.Optimizer")
    return optimizer


@contextmanager
def without_closure(optimizer: Optimizer) -> Iterator[None]:
    """Raise a StepError if the optimizer's step demands a closure, or is missing, as LOMO's."""
    try:
        yield
    except Exception as error:
        if inspect.unwrap(type(optimizer).step) is inspect.unwrap(Optimizer.step):
            raise StepError(
                f"{type(optimizer).__name__} has no step(): it trains in its backward pass. Try "
                "batchfinder run on your script, or a step(model, batch) that returns None"
            ) from error
        line = extract_tb(error.__traceback__)[-1].line
        if "closure" not in f"{line} {error}":
            raise
        raise StepError(
            f"the step of {type(optimizer).__name__} demands a closure, and is called without one; "
            "let step(model, batch) call it with your closure, and return None"
        ) from error


class StepsMade:
    """Note which optimizers make steps."""

    def __init__(self) -> None:
        self._by = WeakSet[Optimizer]()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note every optimizer that makes a step while the block runs."""
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: self._by.add(optimizer))
        try:
            yield
        finally:
            handle.remove()

    def remarks(self, setup: TrainingSetup) -> Iterator[str]:
        """Yield warnings about optimizers of another model, and optimizers that made no step."""
        given = setup.optimizer
        own = {*setup.model.parameters()}
        if isinstance(given, Optimizer) and own.isdisjoint(parameters_of(given)):
            yield (
                f"the optimizer, {type(given).__name__}, holds no parameter of the model. "
                "Make it from model.parameters()"
            )
        for optimizer in reachable(setup.functions):
            if not isinstance(optimizer, Optimizer):
                continue
            is_plain = isinstance(optimizer, SGD) and not optimizer.defaults["momentum"]
            if not (optimizer.state or is_plain or optimizer in self._by):
                yield (
                    f"{type(optimizer).__name__}, which the step reaches, made no step, so the "
                    "memory of its states is not counted. Call its step() in every training step"
                )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer holds, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
