"""The first examples of a data set that can only be iterated over, by their place."""

from __future__ import annotations

import itertools
from typing import Any

from torch.utils.data import IterableDataset

from batchfinder.training.data.lengths import FIRST_EXAMPLES, MOST_EXAMPLES, lengths_of


class Beginning(list[Any]):
    """The first examples of a stream that goes on."""


def read_by_place(dataset: IterableDataset[Any]) -> Any:
    """Return the first examples of a stream, as far as they show its lengths.

    That is 64 if they are all of one length, else 2048. A stream that would be used up, as it gives
    the same iterator each time, is returned as it is.

    Example:
        >>> class Numbers(IterableDataset):
        ...     def __iter__(self):
        ...         return itertools.count()
        >>> len(read_by_place(Numbers()))
        64
    """
    if iter(dataset) is iter(dataset):
        return dataset
    stream = iter(dataset)
    examples = [*itertools.islice(stream, FIRST_EXAMPLES)]
    if examples and lengths_of(examples).vary:
        examples += itertools.islice(stream, MOST_EXAMPLES - len(examples))
    has_ended = next(stream, dataset) is dataset
    return examples if has_ended else Beginning(examples)
