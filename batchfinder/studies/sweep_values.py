"""The values of a sweep: how they reach the target or its batches, and steps that mix them."""

from __future__ import annotations

import dataclasses
import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from batchfinder.errors import (
    BatchFinderError,
    SampleError,
    TargetError,
    UsageError,
    UserCodeError,
    reason_of,
)
from batchfinder.probing.choose_prober import choose_prober
from batchfinder.probing.options import ProbeOptions
from batchfinder.search.prober import Prober
from batchfinder.studies.size_sweep import SizeSweep
from batchfinder.studies.sweep_result import SweepRow, share_of
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.target import name_of, refuse_unknown_arguments
from batchfinder.training.tree import named_tensors

MOST_ARGUMENTS = 2  # rows grow with the product of all values

# Percentages of the batch sizes tried for a training that mixes the lengths. At 100, a small
# transformer ran out of memory within 35 shuffled steps: other lengths leave other gaps.
MIXED_PERCENTAGES = (100, 95, 90, 85, 80, 70, 60, 50)

MIXED_LESS = (
    "a training that mixes the lengths fragments the allocator: steps of all lengths in turn were "
    "confirmed at {} % of the sizes in the table, which the lines to paste have"
)
MIXED_NONE = (
    "steps of all lengths in turn ran out of memory even at half of the sizes in the table. Try to "
    "train on one length only, or, on CUDA, PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
MIXED_FAILED = (
    "the lines to paste hold for each length alone: steps of all lengths in turn, by the model of "
    "the longest, failed ({})"
)


def combinations(over: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the swept values. The last argument changes first.

    Numbers of NumPy and PyTorch become Python's, as results are written as JSON.

    Raises:
        UsageError: an argument has no values or one twice, or is the batch size, or too many
            arguments are swept.

    Example:
        >>> combinations({"height": [1, 2], "width": [3]})
        [{'height': 1, 'width': 3}, {'height': 2, 'width': 3}]
    """
    if not 1 <= len(over) <= MOST_ARGUMENTS:
        raise UsageError(f"a sweep is over one or two arguments, not {len(over)}. Try one.")
    over = {name: _plain(values) for name, values in over.items()}
    for name, values in over.items():
        if name == "batch_size":
            raise UsageError("a sweep finds the batch_size. Try an argument such as seq_len.")
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise UsageError(
                f"{name} needs a list of values, not {values!r}. Try [512, 1024, 2048]"
            )
        if not values:
            raise UsageError(f"{name} has no values. Try {name}=512,1024,2048.")
        if len({*map(repr, values)}) < len(values):
            raise UsageError(
                f"{name} has a value twice: {', '.join(map(str, values))}. Try each one once."
            )
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def _plain(values: Any) -> Any:
    """Return the numbers of an array, or of a list, as Python's; other values as they are."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple):
        return values
    return [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]


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


def mixed_percent(
    load_longest: Callable[[], TrainingSetup],
    parts: Sequence[tuple[BatchMaker, int]],
    options: ProbeOptions,
    on_begin: Callable[[str], None] = lambda _: None,
) -> tuple[int | None, str]:
    """Find the percentage of the batch sizes at which steps of all lengths run in turn.

    The model of the longest examples trains on all. The ``parts`` make the batches of each length,
    with its largest batch size; the longest first.

    Returns:
        One of ``MIXED_PERCENTAGES``, 0 if none fits, or None if the steps failed otherwise; and a
        warning for the user, "" if there is none.
    """
    setup = dataclasses.replace(load_longest(), sample=None, make_batch=partial(_mixed, parts))
    try:
        with closing(choose_prober(setup, dataclasses.replace(options, smallest=1))) as prober:
            for percent in MIXED_PERCENTAGES:
                on_begin(f"all values in turn: confirming {percent} % ...")
                if _fits(prober, percent):
                    is_less = percent < max(MIXED_PERCENTAGES)
                    return percent, MIXED_LESS.format(percent) if is_less else ""
    except BatchFinderError as error:  # the sizes of each length hold without it
        return None, MIXED_FAILED.format(reason_of(error))
    return 0, MIXED_NONE


def _fits(prober: Prober, percent: int) -> bool:
    """Confirm a percentage.

    Raises:
        UserCodeError: the user's step fails, for example because its model takes one length only.
        BatchFinderError: the prober fails.
    """
    try:
        return prober.probe(percent, confirm=True).fits
    except BatchFinderError:
        raise
    except Exception as error:  # in this process, the user's exceptions are raised unchanged
        raise UserCodeError(reason_of(error)) from error


def _mixed(parts: Sequence[tuple[BatchMaker, int]], percent: int, step: int) -> Any:
    """Make the batch of a step: one length after another, as training mixes them."""
    batches, batch_size = parts[step % len(parts)]
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


def note_of(error: Exception, *, is_first: bool) -> str:
    """Return why a value is impossible; raise an error that the other values would meet too."""
    if isinstance(error, UsageError) or (is_first and isinstance(error, SampleError | TargetError)):
        raise error
    # The frames hold the model, which must be gone before the next one is built.
    if isinstance(error, BatchFinderError):
        error.__traceback__ = None  # it has the user's own traceback as text
    traceback.clear_frames(error.__traceback__)
    return reason_of(error)
