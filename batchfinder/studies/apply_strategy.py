"""A strategy applied to a setup while a block runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.errors import StepError
from batchfinder.probing.options import ProbeOptions
from batchfinder.studies.checkpointing import model_kept, with_checkpointing
from batchfinder.studies.strategies import Strategy, eight_bit_package
from batchfinder.training.setup import MakeBatch, OptimizerSpec, TrainingSetup
from batchfinder.training.step_source import own_precision
from batchfinder.training.target import accepts
from batchfinder.training.tree import map_leaves

PURE = "pure-bf16"
MOMENTUM = 0.9  # the usual one; the size of SGD's states does not depend on it


@dataclass(frozen=True)
class Applied:
    """A strategy, ready to train.

    Attributes:
        setup: trains with the strategy. Its model is the user's, changed while the block runs.
        options: options of its steps.
        blocks: the modules recomputed in the backward pass, as text; "" without checkpointing.
    """

    setup: TrainingSetup
    options: ProbeOptions
    blocks: str = ""


@contextmanager
def applied(strategy: Strategy, setup: TrainingSetup, options: ProbeOptions) -> Iterator[Applied]:
    """Apply a strategy, and restore the model when the block ends.

    Raises:
        StepError: this model or this environment does not support the strategy.
    """
    model = setup.model
    blocks = ""
    own = own_precision(setup)
    if strategy.precision and own:
        raise StepError(
            f"the step sets its own precision, {own}. Try --precision of an hf: target, or the "
            "arguments of the Trainer."
        )
    with ExitStack() as stack:
        stack.enter_context(model_kept(model))
        if strategy.precision == PURE:
            stack.enter_context(_in_bf16(model))
            setup = _with_bf16_batches(setup)
        if strategy.checkpointing:
            setup, blocks = with_checkpointing(setup, strategy.checkpointing)
        if strategy.optimizer:
            setup = dataclasses.replace(setup, optimizer=optimizer_of(strategy.optimizer))
        elif isinstance(setup.optimizer, Optimizer) and (
            strategy.precision == PURE or strategy.parallel == "fsdp"
        ):
            setup = dataclasses.replace(setup, optimizer=_remade(setup.optimizer))
        precision = strategy.precision or options.precision
        options = dataclasses.replace(
            options,
            precision="fp32" if precision == PURE else precision,
            accumulate=options.accumulate or strategy.accumulate,
            compiled=options.compiled or strategy.compiled,
        )
        yield Applied(setup, options, blocks)


def optimizer_of(name: str) -> OptimizerSpec:
    """Return the optimizer that a strategy names, in a form that a setup accepts.

    Raises:
        StepError: it is not available.
    """
    if name == "sgd":  # without momentum it has no states, and such training is rare
        return functools.partial(torch.optim.SGD, lr=0.01, momentum=MOMENTUM)
    if name == "adafactor" and not hasattr(torch.optim, "Adafactor"):
        raise StepError(
            f"Adafactor needs PyTorch 2.5 or newer, and this is {torch.__version__}. "
            "Try adamw-8bit."
        )
    return _eight_bit() if name == "adamw-8bit" else name


def _eight_bit() -> OptimizerSpec:
    package = eight_bit_package()
    if package is None:
        raise StepError("no package for 8-bit optimizers is installed. Try bitsandbytes.")
    try:
        made: OptimizerSpec = import_module(f"{package}.optim").AdamW8bit
    except (ImportError, AttributeError) as error:
        raise StepError(f"{package} has no AdamW8bit ({error}). Try another version.") from error
    return made


def _remade(optimizer: Optimizer) -> Callable[[Any], Optimizer]:
    """Return a factory of optimizers like this one, for the parameters that replace its own.

    Some defaults are no arguments: AdamW sets ``decoupled_weight_decay`` for Adam, its base.
    """
    made, defaults = type(optimizer), optimizer.defaults.items()
    known = {key: value for key, value in defaults if value is not None and accepts(made, key)}
    return functools.partial(made, **known)


@contextmanager
def _in_bf16(model: nn.Module) -> Iterator[None]:
    """Convert a model's parameters and buffers to bf16, and restore its values bit for bit.

    The original values wait in host memory, so the device holds only what pure bf16 needs.
    """
    kept = [
        (own, own.device, _on_host(own), own.grad, None if own.grad is None else own.grad.data)
        for own in model.parameters()
    ]
    model.to(torch.bfloat16)
    try:
        yield
    finally:
        for parameter, device, data, gradient, values in kept:
            parameter.grad = None  # a gradient of another dtype would be refused
            parameter.data = data.to(device)
            if gradient is not None and values is not None:
                gradient.data = values
            parameter.grad = gradient


def _on_host(parameter: nn.Parameter) -> Tensor:
    # A model built on the meta device has no values.
    return parameter.data if parameter.is_meta else parameter.data.cpu()


def _with_bf16_batches(setup: TrainingSetup) -> TrainingSetup:
    """Return a setup whose batches are bf16 where they were floating-point."""
    make_batch = setup.make_batch and _casting(setup.make_batch)
    return dataclasses.replace(setup, sample=_cast(setup.sample), make_batch=make_batch)


def _casting(make_batch: MakeBatch) -> MakeBatch:
    @functools.wraps(make_batch)  # keeps its signature, which shows whether it takes a step
    def cast(*args: Any) -> Any:
        return _cast(make_batch(*args))

    return cast


def _cast(batch: Any) -> Any:
    def cast(_: str, leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(torch.bfloat16) if is_float else leaf

    return map_leaves(cast, batch)
