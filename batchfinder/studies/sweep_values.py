"""The values of a sweep, and how they reach the target or its batches."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from batchfinder.errors import UsageError
from batchfinder.studies.size_sweep import SizeSweep
from batchfinder.studies.sweep_result import SweepRow, share_of
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


class MixedBatches:
    """``make_batch(percent, step) -> batch``: one length after another, as training mixes them.

    Args:
        parts: makes the batches of each length, with its largest batch size; the longest first.
    """

    def __init__(self, parts: Sequence[tuple[BatchMaker, int]]) -> None:
        self._parts = parts

    def __call__(self, percent: int, step: int) -> Any:
        """Make the batch of a step, at this percentage of the largest batch size."""
        batches, batch_size = self._parts[step % len(self._parts)]
        return batches.make(share_of(batch_size, percent), step=step)


def elements_of(batches: BatchMaker) -> float:
    """Return the number of tensor elements in one example of a batch."""
    batch_size = 2
    tensors = [tensor for _, tensor in named_tensors(batches.make(batch_size))]
    return sum(tensor.numel() for tensor in tensors) / batch_size


def outside_in(rows: Sequence[SweepRow]) -> list[int]:
    """Return the order to search in: both ends, then the middle of the widest gap each time."""
    lengths = [row.length for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (lengths[i] or 0.0, i))
    done = [len(order) - 1, 0][: len(order)]
    while len(done) < len(order):
        known = sorted(done)
        start, end = max(itertools.pairwise(known), key=lambda gap: gap[1] - gap[0])
        done.append((start + end) // 2)
    return [order[place] for place in done]


class ExampleSizes:
    """The example size that memory grows with: an example's elements, or else the swept value.

    Some sweeps do not change the batch, such as a sweep over the model's depth. Then every example
    has the same number of elements, so the swept value is used.
    """

    def __init__(self, finder: SizeSweep) -> None:
        self._scaling = finder.scaling
        self._lengths: dict[float, float] = {}  # by the elements of an example
        self._by_length = False

    def size_of(self, row: SweepRow, elements: float) -> float | None:
        """Return the size of a row's examples; None if its values are not positive numbers."""
        if row.length is None or row.length <= 0:
            return None
        if self._lengths.setdefault(elements, row.length) != row.length and not self._by_length:
            self._by_length = True
            self._scaling.rename(self._lengths)
        return row.length if self._by_length else elements
