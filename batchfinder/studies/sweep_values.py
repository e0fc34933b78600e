"""The values of a sweep, and how they reach the target or its batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from batchfinder.errors import UsageError
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.target import name_of, refuse_unknown_arguments
from batchfinder.training.tree import named_tensors

MOST_ARGUMENTS = 2  # rows grow with the product of all values


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
    refuse_unknown_arguments(name_of(setup.make_batch), values, setup.make_batch)
    return dataclasses.replace(setup, make_batch=partial(setup.make_batch, **values))


def elements_of(setup: TrainingSetup, batch_dim: int) -> float:
    """Return the number of tensor elements in one example of the batch."""
    batch_size = 2
    batches = BatchMaker(setup.sample, make_batch=setup.make_batch, batch_dim=batch_dim)
    tensors = [tensor for _, tensor in named_tensors(batches.make(batch_size))]
    return sum(tensor.numel() for tensor in tensors) / batch_size
