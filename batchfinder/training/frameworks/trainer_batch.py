"""The batches of a ``Trainer`` of transformers, as long as any that it will train on.

Every batch in training is padded to its longest example, by a collator of the user's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from batchfinder.errors import SampleError
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import MakeBatch, Trainer
from batchfinder.training.state.snapshot import preserved_state
from batchfinder.training.tree import described_shapes, named_tensors

# The most examples to look at for the longest; the first few tell whether lengths differ at all.
# Always the same ones, since worker processes and ranks look for themselves.
MOST_EXAMPLES = 2048
FIRST_EXAMPLES = 64


@dataclasses.dataclass(frozen=True)
class LongestBatch:
    """What is tried in place of the batches of a Trainer; one of the first two is None.

    Attributes:
        sample: a batch of its longest examples, which may be repeated.
        make_batch: makes a batch of those examples, where their repetition would be another one.
        remarks: what the user should know of it.
    """

    sample: Any
    make_batch: MakeBatch | None
    remarks: tuple[str, ...] = ()


class Collated:
    """``make_batch(batch_size) -> batch``: some examples in turn, through a collator.

    Args:
        collate: the Trainer's.
        examples: at least one.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], examples: list[Any]) -> None:
        self._collate = collate
        self._examples = examples

    def __call__(self, batch_size: int) -> Any:
        """A batch of the examples, each as often as another or once more."""
        count = len(self._examples)
        # Copies, since collators change what they are given, as the labels that they pad.
        return self._collate([copy.copy(self._examples[i % count]) for i in range(batch_size)])


def longest_batch(trainer: Trainer) -> LongestBatch:
    """A batch of the longest examples that a Trainer has, made as its DataLoader makes one.

    For each of an example's values (inputs and labels, say) the one with the longest is taken. Up
    to 2048 examples are looked at, evenly over the data set, or 64 where these are all of the same
    length.

    Args:
        trainer: stays as it is.

    Raises:
        SampleError: there are no examples.
        Exception: what data set and collator raise.
    """
    if hasattr(trainer.train_dataset, "__len__") and not len(trainer.train_dataset):
        raise SampleError("the Trainer's train_dataset has no examples; give it at least one")
    with preserved_state(), _no_loader_noted(trainer):
        loader = trainer.get_train_dataloader()
        dataset: Any = getattr(loader, "dataset", None)
        collate = getattr(loader, "collate_fn", None)
        if collate is None or not _has_places(dataset):
            remark = (
                "the batches tried are as long as the first one of the Trainer's; give a sample "
                "as long as any in training"
            )
            return LongestBatch(_first_batch(loader), None, remarks=(remark,))
        remarks = []
        places, are_all, looked_at = _longest(dataset)
        if not are_all:
            remarks.append(
                f"the batches tried are as long as the longest of {looked_at} examples of the "
                f"Trainer's {len(dataset)}; give a sample as long as any in training"
            )
        make = Collated(collate, [dataset[place] for place in places])
        batch = make(len(places))
        is_repeatable = _as_when_repeated(batch, make, 2 * len(places))
    return LongestBatch(
        batch if is_repeatable else None,
        None if is_repeatable else make,
        tuple(remarks),
    )


@contextmanager
def _no_loader_noted(trainer: Trainer) -> Iterator[None]:
    """Accelerate notes each DataLoader, with which the data would go to every worker process."""
    noted = getattr(getattr(trainer, "accelerator", None), "_dataloaders", [])
    before = list(noted)
    try:
        yield
    finally:
        noted[:] = before


def _first_batch(loader: Any) -> Any:
    batch = next(iter(loader))
    if hasattr(loader, "end"):  # one of Accelerate's, else taken for the one that is iterated over
        loader.end()
    return batch


def _has_places(dataset: Any) -> bool:
    return (
        hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, IterableDataset)
    )


def _as_when_repeated(batch: Any, make: Collated, batch_size: int) -> bool:
    """Whether a larger batch is the smaller one with its examples repeated.

    It is not where a collator packs texts into one row, or joins the patches of all images.
    """
    try:
        repeated = BatchMaker(batch).make(batch_size)
    except SampleError:
        return False
    shapes = [described_shapes(named_tensors(tree)) for tree in (repeated, make(batch_size))]
    return shapes[0] == shapes[1]


def _longest(dataset: Any) -> tuple[list[int], bool, int]:
    """Where the longest examples are, whether none can be longer, how many were looked at."""
    size = len(dataset)
    places = _spread(range(size), MOST_EXAMPLES)
    few = _spread(places, FIRST_EXAMPLES)
    longest, are_alike = _longest_among(dataset, few)
    if are_alike:
        return longest, True, len(few)
    return _longest_among(dataset, places)[0], len(places) == size, len(places)


def _spread(places: range, most: int) -> range:
    """At most this many of some places, evenly over them."""
    return places[:: -(-len(places) // most)]


def _longest_among(dataset: Any, places: range) -> tuple[list[int], bool]:
    """Where the longest of each value is, and whether all are of one length."""
    longest: dict[Any, tuple[int, int]] = {}
    are_alike = True
    for place in places:
        for key, length in _lengths(dataset[place]):
            most, _ = longest.setdefault(key, (length, place))
            are_alike = are_alike and length == most
            if length > most:
                longest[key] = length, place
    return sorted({place for _, place in longest.values()}), are_alike


def _lengths(example: Any) -> Iterator[tuple[Any, int]]:
    """How long each value of an example is."""
    if isinstance(example, Mapping):
        items = list(example.items())
    elif isinstance(example, list | tuple):
        items = list(enumerate(example))
    elif _is_single(example) or not hasattr(example, "__dict__"):
        items = [("", example)]
    else:
        items = list(vars(example).items())  # transformers' own collators take such objects too
    for key, value in items:
        yield key, _length(value)


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "size")


def _length(value: Any) -> int:
    """A text by its tokens or characters, an image by its pixels, a list of such by their sum."""
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
    # Only the first tells what a list holds: to ask each token would take seconds.
    is_nested = isinstance(value, list | tuple) and value and not isinstance(value[0], Number)
    return sum(map(_length, value)) if is_nested else len(value)
