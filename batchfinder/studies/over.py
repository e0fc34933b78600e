"""The values of a sweep, and how they reach the target or its batches."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from batchfinder.errors import UsageError
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.tree import named_tensors
from batchfinder.training.user_module import did_you_mean, it_has

MOST_ARGUMENTS = 2


def combinations(over: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the swept values. The last argument changes first.

    Raises:
        UsageError: an argument has no values or a value twice, or too many arguments are swept.

    Example:
        >>> combinations({"height": [1, 2], "width": [3]})
        [{'height': 1, 'width': 3}, {'height': 2, 'width': 3}]
    """
    if not 1 <= len(over) <= MOST_ARGUMENTS:
        raise UsageError(f"a sweep is over one or two arguments, not {len(over)}.")
    for name, values in over.items():
        if not values:
            raise UsageError(f"{name} has no values. Try {name}=512,1024,2048.")
        if len({*map(repr, values)}) < len(values):
            raise UsageError(f"{name} has a value twice: {', '.join(map(str, values))}")
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def takes(function: Callable[..., Any] | None, name: str) -> bool:
    """Return True if a function takes an argument by keyword."""
    if function is None:
        return False
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return name in parameters and parameters[name].kind in kinds


def refuse_unknown(names: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Refuse a swept argument that a function does not take.

    Raises:
        UsageError: the function does not take it. The message names the nearest argument.
    """
    for name in names:
        if not takes(function, name):
            known = [*inspect.signature(function).parameters]
            hint = did_you_mean(name, known) or it_has(known)
            called = getattr(function, "__name__", "the function")
            raise UsageError(f"{called} takes no argument {name}{hint}")


def bound(setup: TrainingSetup, values: Mapping[str, Any]) -> TrainingSetup:
    """Return a setup that calls ``make_batch`` with the swept values.

    Raises:
        UsageError: there is no ``make_batch``, or it does not take them.
    """
    if not values:
        return setup
    if setup.make_batch is None:
        raise UsageError(
            f"nothing takes the argument {next(iter(values))}. Try a function that builds the "
            "model and its sample for it, or make_batch(batch_size, NAME=value)."
        )
    refuse_unknown(values, setup.make_batch)
    return dataclasses.replace(setup, make_batch=partial(setup.make_batch, **values))


def elements_of(setup: TrainingSetup, batch_dim: int) -> float:
    """Return the number of tensor elements in one example of the batch."""
    batch_size = 2
    batches = BatchMaker(setup.sample, make_batch=setup.make_batch, batch_dim=batch_dim)
    tensors = [tensor for _, tensor in named_tensors(batches.make(batch_size))]
    return sum(tensor.numel() for tensor in tensors) / batch_size
