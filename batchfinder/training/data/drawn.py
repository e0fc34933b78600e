"""Draw batches of any size from a data set: the longest first, others as its sampler draws them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import RandomSampler

from batchfinder.errors import SampleError
from batchfinder.training.data.lengths import MOST_EXAMPLES, SEED, lengths_of
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import MakeBatch
from batchfinder.training.state.process_settings import repeatable
from batchfinder.training.tree import named_leaves, named_tensors
from batchfinder.training.user_traceback import raised_while

Collate = Callable[[list[Any]], Any]

# The number of different batches in a confirmation. After them it starts over with the longest.
DRAWN_BATCHES = 7

# A collator may draw the shape of a batch at random, as for training at many scales. It has if
# FEW_SEEDS calls differ, and then the largest batch of SEEDS calls is the longest.
FEW_SEEDS, SEEDS = 8, 64


@dataclasses.dataclass(frozen=True)
class DataBatches:
    """The batches that a search trains on, drawn from a data set.

    Attributes:
        sample: a batch of the longest examples; None if repeating it gives another batch than the
            collator would.
        make_batch: ``make_batch(batch_size, step)`` if lengths vary; ``make_batch(batch_size)`` if
            they do not and there is no sample; else None.
        remarks: texts for the user.
        examples: the number of examples in an epoch; None if it is unknown.
    """

    sample: Any
    make_batch: MakeBatch | None
    remarks: tuple[str, ...] = ()
    examples: int | None = None

    @property
    def make_longest(self) -> Callable[[int], Any]:
        """``make_longest(batch_size) -> batch`` of the longest examples, without the data set."""
        if isinstance(self.make_batch, Drawn):
            return self.make_batch.longest
        return self.make_batch or BatchMaker(self.sample).make


@dataclasses.dataclass(frozen=True, eq=False)
class Collated:
    """``make_batch(batch_size) -> batch``: repeats some examples in turn, through a collator.

    With a ``seed``, random numbers of the collator start from it.
    """

    collate: Collate
    examples: list[Any]
    owner: str
    seed: int | None = None

    def __call__(self, batch_size: int) -> Any:
        """Make a batch. Each example occurs equally often, or once more than others."""
        count = len(self.examples)
        # Copied, because collators change the examples: they pad the labels, for example.
        seeded = nullcontext() if self.seed is None else repeatable(seed=self.seed)
        with raised_while(f"{self.owner} made a batch"), seeded:
            return self.collate([copy.copy(self.examples[i % count]) for i in range(batch_size)])


@dataclasses.dataclass(frozen=True, eq=False)
class Drawn:
    """``make_batch(batch_size, step) -> batch``: the longest in step 0, later ones as drawn."""

    longest: Collated
    dataset: Any
    places: Sequence[int]  # in the order of a sampler; they repeat when they are used up

    def __call__(self, batch_size: int, step: int) -> Any:
        """Make the batch of a step. Above 2048 examples, the examples in a batch repeat."""
        if step == 0:
            return self.longest(batch_size)
        count = min(batch_size, MOST_EXAMPLES)
        first = (step - 1) * count
        places = (self.places[i % len(self.places)] for i in range(first, first + count))
        with raised_while(f"{self.longest.owner} made a batch"):
            examples = [self.dataset[place] for place in places]
        seed = None if self.longest.seed is None else step
        return dataclasses.replace(self.longest, examples=examples, seed=seed)(batch_size)


def batches_of(dataset: Any, collate: Collate, sampler: Any, owner: str) -> DataBatches:
    """Choose the batches of a data set that a search trains on.

    Args:
        dataset: a data set with a length and examples by index. This process reads the examples.
        collate: makes a batch from a list of examples.
        sampler: yields indices of the data set in training. It is copied, not changed. None: a
            random order.
        owner: the owner of the data set, for messages, such as "the Trainer".
    """
    with raised_while(f"{owner} made a batch"):
        if not len(dataset):
            raise SampleError(f"the data set of {owner} has no examples. Try one with at least 1.")
        lengths = lengths_of(dataset)
        longest, shortest = (
            Collated(collate, [dataset[place] for place in places], owner)
            for places in (lengths.longest, lengths.shortest)
        )
        count = len(lengths.longest)
        longest = _largest(longest, count)
        batch = longest(count)
        is_repeatable = _as_when_repeated(batch, longest, 2 * count)
        make_batch: MakeBatch | None = None if is_repeatable else longest
        # A collator may pad all batches to one length.
        differ = lengths.vary and _shapes(shortest(count)) != _shapes(batch)
        if differ or longest.seed is not None:
            places = drawn_places(sampler or RandomSampler(dataset))
            make_batch = Drawn(longest, dataset, places)
    remark = (
        f"the longest batch tried is as long as the longest of {lengths.looked_at} examples "
        f"of {owner}'s {len(dataset)}; give a sample as long as any in training"
    )
    remarks = () if lengths.are_sure else (remark,)
    epoch = dataset if sampler is None else sampler  # which may draw fewer, or never end
    examples = len(epoch) if hasattr(epoch, "__len__") else None
    return DataBatches(batch if is_repeatable else None, make_batch, remarks, examples)


def _largest(longest: Collated, count: int) -> Collated:
    """Return it with the seed of its largest batch, if its collator draws the shapes of batches."""
    seeded = [dataclasses.replace(longest, seed=seed) for seed in range(SEEDS)]
    shapes = [_shapes(each(count)) for each in seeded[:FEW_SEEDS]]
    if all(each == shapes[0] for each in shapes):
        return longest
    return max(seeded, key=lambda each: sum(t.numel() for _, t in named_tensors(each(count))))


def drawn_places(sampler: Any) -> list[int]:
    """Return the first indices that a copy of a sampler draws from a fixed seed."""
    sampler = copy.copy(sampler)
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    random.seed(SEED)
    return list(itertools.islice(sampler, DRAWN_BATCHES * MOST_EXAMPLES))


def _as_when_repeated(batch: Any, make: Collated, batch_size: int) -> bool:
    """Return True if a larger batch is alike to the smaller one with repeated examples.

    It is not if a collator packs texts into one row, joins the patches of all images, or lists the
    length of each text.
    """
    try:
        repeated = BatchMaker(batch).make(batch_size)
    except SampleError:
        return False
    return _shapes(repeated) == _shapes(make(batch_size))


def _shapes(batch: Any) -> list[tuple[str, Any]]:
    """Return the path of each leaf, with the shape of a tensor: equal for batches that are alike.

    Lists count too: a collator may return the lengths of texts as a list of numbers.
    """
    return [(path, getattr(leaf, "shape", None)) for path, leaf in named_leaves(batch)]
