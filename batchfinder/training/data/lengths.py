"""Find the longest examples of a data set."""

from __future__ import annotations

import copy
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Number
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from batchfinder.training.state.process_settings import seeded
from batchfinder.training.tree import elements_in, named_tensors

# Examples to read when looking for the longest, and the few that show whether lengths differ at
# all. All examples are read if that takes no more than READING_SECONDS: one that is longer than all
# others comes up once in an epoch. Images that a collator loads may take MOST_SECONDS; a power of
# two of them is read then, so that the same machine reads as many each time.
MOST_EXAMPLES = 2048
FIRST_EXAMPLES = 64
READING_SECONDS = 5.0
MOST_SECONDS = 30.0

# The seed of all draws. It is fixed so that all searches and workers draw the same.
SEED = 0


T = TypeVar("T")
Collate = Callable[[list[Any]], Any]
Length: TypeAlias = tuple[Any, int]  # of a value, by its key


@dataclass(frozen=True)
class Lengths:
    """The longest and the shortest examples of a data set, by index.

    Attributes:
        longest: the indices of the longest examples, one for each value (inputs, labels).
        shortest: the indices of the shortest examples, one for each value.
        vary: True if examples differ in length.
        looked_at: the number of examples that were read.
        are_sure: True if all examples were read, or all that were read have one length.
        totals: the length of all values together of each example that was read, by index.
    """

    longest: list[int]
    shortest: list[int]
    vary: bool
    looked_at: int
    are_sure: bool
    totals: dict[int, int] = field(repr=False)


def lengths_of(dataset: Any, collate: Collate | None = None) -> Lengths:
    """Find the longest examples of a data set.

    The lengths of an example are those of its values; or those of the tensors in a batch of it
    alone, if these do not grow with the values, as where an example is the name of an image.

    At first, 64 examples are read, spread evenly over the data set. If they differ in length, 2048
    are read, or all of them if that takes seconds (:data:`READING_SECONDS`); fewer if a batch of
    each is needed and that takes half a minute (:data:`MOST_SECONDS`). Without ``collate``, only
    the examples are looked at.

    Example:
        >>> lengths_of(["a", "abc", "ab"])
        Lengths(longest=[1], shortest=[0], vary=True, looked_at=3, are_sure=True)
    """
    size, started = len(dataset), time.monotonic()
    alone, of_values = dict[int, list[Length]](), dict[int, list[Length]]()
    for place in spread(size, FIRST_EXAMPLES):
        example = dataset[place]
        alone[place] = _lengths_alone(collate, example)
        of_values[place] = _lengths(example)
    is_enough = _grow_alike(alone, of_values)
    few = _lengths_of(of_values if is_enough else alone, size)
    if not few.vary:
        return replace(few, are_sure=True)
    if is_enough:
        return _lengths_of(read_many(size, lambda place: _lengths(dataset[place])), size)
    in_time = MOST_SECONDS / (time.monotonic() - started) * few.looked_at
    most = min(MOST_EXAMPLES, max(FIRST_EXAMPLES, 2 ** math.floor(math.log2(in_time))))
    alone = read_many(size, lambda place: _lengths_alone(collate, dataset[place]), most)
    return _lengths_of(alone, size)


def _grow_alike(alone: Mapping[int, list[Length]], of_values: Mapping[int, list[Length]]) -> bool:
    """Return True if each tensor of the batches grows with one of the values.

    The longest value then makes the longest tensor, as with token ids that a collator pads.
    """

    def by_key(lengths: Mapping[int, list[Length]]) -> Iterable[Mapping[int, int]]:
        found: dict[Any, dict[int, int]] = defaultdict(dict)
        for place, each in lengths.items():
            for key, length in each:
                found[key][place] = length
        return found.values()

    def grows_with(value: Mapping[int, int], tensor: Mapping[int, int]) -> bool:
        pairs = sorted((value.get(place, 0), length) for place, length in tensor.items())
        return all(a[1] == b[1] if a[0] == b[0] else a[1] <= b[1] for a, b in pairwise(pairs))

    values = [*by_key(of_values)]
    return all(any(grows_with(value, tensor) for value in values) for tensor in by_key(alone))


def _lengths_alone(collate: Collate | None, example: Any) -> list[Length]:
    """Return the lengths of the tensors in a batch of one example; none if it is refused."""
    if collate is None:
        return []
    try:
        with seeded(SEED):  # it may draw lengths at random
            batch = collate([copy.copy(example)])
    except Exception:  # noqa: BLE001 - a collator of pairs may raise anything
        return []
    return [*elements_in(batch).items()]


def read_many(size: int, read: Callable[[int], T], most: int = MOST_EXAMPLES) -> dict[int, T]:
    """Read ``most`` examples of a data set, or all if that takes seconds; return them by index."""
    started = time.monotonic()
    many = {place: read(place) for place in spread(size, most)}
    seconds = (time.monotonic() - started) / len(many) * size
    if seconds <= READING_SECONDS:
        many |= {place: read(place) for place in range(size) if place not in many}
    return many


def spread(size: int, most: int) -> list[int]:
    """Return at most this many of the indices below a size: one at random in each equal part.

    At equal distances they could all be of one kind, as data sets often alternate several kinds.
    """
    parts = min(size, most)
    edges = [part * size // parts for part in range(parts + 1)]
    draw = random.Random(SEED)
    return [draw.randrange(start, end) for start, end in pairwise(edges)]


def _lengths_of(examples: Mapping[int, list[Length]], size: int) -> Lengths:
    """Return the longest and shortest example of each value; the first if several are equal."""
    found: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    totals: dict[int, int] = defaultdict(int)
    for place, lengths in examples.items():
        for key, length in lengths:
            found[key].append((length, place))
            totals[place] += length
    longest, shortest = (
        [end(of_key, key=itemgetter(0)) for of_key in found.values()] for end in (max, min)
    )
    return Lengths(
        sorted({place for _, place in longest}),
        sorted({place for _, place in shortest}),
        vary=longest != shortest,
        looked_at=len(examples),
        are_sure=len(examples) == size,
        totals=totals,
    )


def _lengths(example: Any) -> list[Length]:
    """Return the key and the length of each value of an example."""
    if isinstance(example, Mapping):
        items = list(example.items())
    elif isinstance(example, list | tuple) and not _is_of_numbers(example):
        items = list(enumerate(example))
    elif hasattr(example, "size") or not hasattr(example, "__dict__"):  # a tensor, an image
        items = [("", example)]
    else:
        items = list(vars(example).items())  # transformers' own collators take such objects too
    return [(key, _length(value)) for key, value in items]


def _is_of_numbers(value: list[Any] | tuple[Any, ...]) -> bool:
    """Return True for a list of numbers, such as token ids. Only the first item is checked.

    Checking all items would take seconds.
    """
    return bool(value) and isinstance(value[0], Number)


def _length(value: Any) -> int:
    """Return the tokens or characters of a text, the pixels of an image, or the sum in a list."""
    if isinstance(value, Tensor):
        return value.numel()
    size = getattr(value, "size", None)
    if isinstance(size, int):  # an array
        return size
    if isinstance(size, tuple):  # an image of PIL
        return int(size[0] * size[1])
    if isinstance(value, Mapping):
        return sum(map(_length, value.values()))
    if not hasattr(value, "__len__"):
        return 1
    is_nested = isinstance(value, list | tuple) and not _is_of_numbers(value)
    return sum(map(_length, value)) if is_nested else len(value)


def padding_remarks(sample: Any) -> list[str]:
    """Return a remark if a sample's attention mask ends in a zero: its texts were padded."""
    for path, mask in named_tensors(sample):
        if "attention_mask" in path and mask.dim() == 2 and mask.numel() and not mask[:, -1].all():
            return [
                f"the sample pads its sequences to {mask.shape[1]}: the answer holds where every "
                "batch has this length; batches of varying length fragment the allocator, so give "
                "--loader FILE.py:FUNCTION (from Python: loader) to train on yours"
            ]
    return []
