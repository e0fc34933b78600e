"""``worst_batch()``: the heaviest batch of a data set whose examples vary in size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchfinder.errors import SampleError
from batchfinder.training.data.lengths import read_many
from batchfinder.training.data.loader import has_places, parts_of
from batchfinder.training.state.snapshot import preserved_state
from batchfinder.training.tree import elements_in
from batchfinder.units import positive


def worst_batch(data: Any, batch_size: int, *, collate_fn: Callable[..., Any] | None = None) -> Any:
    """Make a batch of the heaviest examples of a data set: the longest, with the most boxes.

    Used as the sample, it makes the answer hold for an epoch over data of varying size. The weight
    of an example is the number of elements in a batch of it alone. The heaviest example of each
    tensor comes first. Of a data set that takes longer than seconds to read, 2048 are weighed.

    Args:
        data: a DataLoader, or a data set with ``len()`` whose examples have an index.
        batch_size: examples in the batch. They repeat if the data set has fewer.
        collate_fn: makes a batch from a list of examples. Default: the loader's, or else PyTorch's.

    Returns:
        The batch that ``collate_fn`` returned.

    Raises:
        UsageError: the batch size is not positive.
        SampleError: the data set has no examples, or they have no index.
        Exception: whatever the data set or the collate function raises.

    Example:
        >>> import torch
        >>> texts = [torch.zeros(3), torch.zeros(9), torch.zeros(5)]
        >>> pad = lambda some: torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
        >>> worst_batch(texts, 2, collate_fn=pad).shape
        torch.Size([2, 9])
    """
    batch_size = positive("batch_size", batch_size)
    dataset, collate, _ = parts_of(data)
    collate = collate_fn or collate
    if not has_places(dataset):
        raise SampleError(
            f"{type(dataset).__name__} has no examples by their place (__len__ and __getitem__). "
            "Try a list of the examples that you expect to be the heaviest."
        )
    if not len(dataset):
        raise SampleError("the data set has no examples. Try one with at least one.")
    with preserved_state(dataset, collate):
        weights = read_many(len(dataset), lambda place: elements_in(collate([dataset[place]])))
        # A batch is as long as its longest input and target, which may be in different examples.
        names = dict.fromkeys(name for each in weights.values() for name in each)
        heaviest = sorted(weights, key=lambda place: -sum(weights[place].values()))
        first = [max(heaviest, key=lambda place: weights[place].get(name, 0)) for name in names]
        order = list(dict.fromkeys([*first, *heaviest]))
        return collate([dataset[order[i % len(order)]] for i in range(batch_size)])
