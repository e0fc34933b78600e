"""Draw batches of any size from a data set: the longest first, others as its sampler draws them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import RandomSampler

from batchfinder.errors import SampleError
from batchfinder.training.data.lengths import MOST_EXAMPLES, SEED, Collate, lengths_of
from batchfinder.training.data.stream import Beginning
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import MakeBatch
from batchfinder.training.state.process_settings import seeded
from batchfinder.training.tree import elements_in, named_leaves
from batchfinder.training.user_traceback import raised_while

# The number of different batches in a confirmation. After them it starts over with the longest.
DRAWN_BATCHES = 7

# A collator may draw the shape of a batch at random, as for training at many scales. It does if
# FEW_SEEDS calls differ, and then the largest batch of SEEDS calls is the longest.
FEW_SEEDS, SEEDS = 8, 64

# A collator may join examples instead of padding them, as the nodes of graphs. Where batches are
# drawn at random, none is of the longest alone: the longest with the largest of this many draws
# stands for all. With log-normal lengths (sigma 0.9, batches of 30, 100 and 1000), it is 3.9, 1.5
# and 1.1 times the mean, and the largest of 20,000 draws is 3.5, 1.5 and 1.1 times.
DRAWS = 256


@dataclasses.dataclass(frozen=True)
class DataBatches:
    """The batches that a search trains on, drawn from a data set.

    Attributes:
        sample: a batch of the longest examples; None if repeating it gives another batch than the
            collator would.
        longest: ``longest(batch_size) -> batch`` of the longest examples, without the data set;
            None if the sample is repeated.
        drawn: ``drawn(batch_size, step) -> batch``, the longest in step 0; None if lengths do not
            vary.
        remarks: texts for the user.
        examples: the number of examples in an epoch; None if it is unknown.
    """

    sample: Any
    longest: Callable[[int], Any] | None = None
    drawn: Callable[[int, int], Any] | None = None
    remarks: tuple[str, ...] = ()
    examples: int | None = None

    @property
    def make_batch(self) -> MakeBatch | None:
        """The function of that name of a TrainingSetup; None if the sample is enough."""
        return self.drawn or self.longest

    @property
    def make_longest(self) -> Callable[[int], Any]:
        """``make_longest(batch_size) -> batch`` of the longest examples, without the data set."""
        return self.longest or BatchMaker(self.sample).make

    def at(self, batch_size: int, step: int) -> Any:
        """Make the batch of a step; the longest in step 0."""
        return self.drawn(batch_size, step) if self.drawn else self.make_longest(batch_size)


@dataclasses.dataclass(frozen=True, eq=False)
class Collated:
    """``make_batch(batch_size) -> batch``: repeats some examples in turn, through a collator.

    With a ``seed``, random numbers of the collator start from it. ``others(count)`` returns further
    examples of a batch, if there are any.
    """

    collate: Collate
    examples: list[Any]
    owner: str
    seed: int | None = None
    others: Callable[[int], list[Any]] | None = None

    def __call__(self, batch_size: int) -> Any:
        """Make a batch. Each example occurs equally often, or once more than others."""
        examples = self.examples
        if self.others is not None and (more := batch_size - len(examples)) > 0:
            examples = [*examples, *self.others(more)]
        count = len(examples)
        # Copied, because collators change the examples: they pad the labels, for example.
        draws = nullcontext() if self.seed is None else seeded(self.seed)
        with raised_while(f"{self.owner} made a batch"), draws:
            return self.collate([copy.copy(examples[i % count]) for i in range(batch_size)])


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
        drawn = dataclasses.replace(self.longest, examples=examples, seed=seed, others=None)
        return drawn(batch_size)


@dataclasses.dataclass(frozen=True, eq=False)
class InTurn:
    """``make_batch(batch_size, step) -> batch``: each batch from one of several data sets, in turn.

    The first has the largest examples.
    """

    parts: list[DataBatches]

    def __call__(self, batch_size: int, step: int) -> Any:
        """Make the batch of a step, at first the longest of each data set."""
        turn, place = divmod(step, len(self.parts))
        return self.parts[place].at(batch_size, turn)


@dataclasses.dataclass(frozen=True, eq=False)
class LargestDraw:
    """``largest(count) -> examples``: those of many random draws that are longest together."""

    dataset: Any
    totals: Mapping[int, int]  # the lengths of examples, by their place

    def __call__(self, count: int) -> list[Any]:
        """Return the examples. Above 2048, they are fewer."""
        places, lengths = list(self.totals), torch.tensor(list(self.totals.values()))
        shape = DRAWS, min(count, MOST_EXAMPLES)
        draws = torch.randint(len(places), shape, generator=torch.Generator().manual_seed(SEED))
        largest = draws[lengths[draws].sum(1).argmax()]
        return [self.dataset[places[number]] for number in largest]


def batches_of(dataset: Any, collate: Collate, sampler: Any, owner: str) -> DataBatches:
    """Choose the batches of a data set that a search trains on.

    Args:
        dataset: a data set with a length and examples by index; or the :class:`Beginning` of one
            without. This process reads the examples.
        collate: makes a batch from a list of examples.
        sampler: yields indices of the data set in training. It is copied, not changed. None: a
            random order.
        owner: the owner of the data set, for messages, such as "the Trainer".
    """
    with raised_while(f"{owner} made a batch"):
        if not len(dataset):
            raise SampleError(f"the data set of {owner} has no examples. Try one with at least 1.")
        lengths = lengths_of(dataset, collate)
        longest, shortest = (
            Collated(collate, [dataset[place] for place in places], owner)
            for places in (lengths.longest, lengths.shortest)
        )
        count = len(lengths.longest)
        if isinstance(sampler, RandomSampler) and _joins(longest, shortest):
            longest = dataclasses.replace(longest, others=LargestDraw(dataset, lengths.totals))
        longest = _largest(longest, count)
        batch = longest(count)
        is_repeatable = _as_when_repeated(batch, longest, 2 * count)
        # A collator may pad all batches to one length.
        differ = lengths.vary and _shapes(shortest(count)) != _shapes(batch)
        drawn = None
        if differ or longest.seed is not None:
            drawn = Drawn(longest, dataset, drawn_places(sampler or RandomSampler(dataset)))
    goes_on = isinstance(dataset, Beginning)
    remark = (
        f"the longest batch tried is as long as the longest of {lengths.looked_at} examples "
        f"of {owner}'s {'stream' if goes_on else len(dataset)}; if others are longer, search with "
        "the longest alone"
    )
    remarks = () if lengths.are_sure and not (goes_on and lengths.vary) else (remark,)
    epoch = dataset if sampler is None else sampler  # which may draw fewer, or never end
    examples = len(epoch) if hasattr(epoch, "__len__") and not goes_on else None
    sample, made = (batch, None) if is_repeatable else (None, longest)
    return DataBatches(sample, made, drawn, remarks, examples)


def batches_in_turn(datasets: Sequence[Any], collate: Collate, owner: str) -> DataBatches:
    """Choose batches of which each is from one of several data sets, as some samplers make them."""
    parts = [batches_of(dataset, collate, None, owner) for dataset in datasets if len(dataset)]
    if not parts:
        raise SampleError(f"the data sets of {owner} have no examples. Try one with at least 1.")
    parts.sort(key=lambda part: _elements(part.make_longest(1)), reverse=True)
    remarks = dict.fromkeys(remark for part in parts for remark in part.remarks)
    examples = sum(map(len, datasets))
    return DataBatches(None, parts[0].make_longest, InTurn(parts), (*remarks,), examples)


def _largest(longest: Collated, count: int) -> Collated:
    """Return ``longest``, seeded for its largest batch if its collator draws shapes at random."""
    seeded = [dataclasses.replace(longest, seed=seed) for seed in range(SEEDS)]
    shapes = [_shapes(each(count)) for each in seeded[:FEW_SEEDS]]
    if all(each == shapes[0] for each in shapes):
        return longest
    return max(seeded, key=lambda each: _elements(each(count)))


def _joins(longest: Collated, shortest: Collated) -> bool:
    """Return True if a batch is smaller where only some examples are long: they are not padded."""
    alike = dataclasses.replace(longest, seed=SEED)
    some = dataclasses.replace(alike, examples=[*longest.examples, *shortest.examples])
    size = len(some.examples)
    return _elements(some(size)) < _elements(alike(size))


def _elements(batch: Any) -> int:
    return sum(elements_in(batch).values())


def drawn_places(sampler: Any) -> list[int]:
    """Return the first indices that a copy of a sampler draws from a fixed seed."""
    sampler = copy.copy(sampler)
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator = torch.Generator().manual_seed(SEED)
    with seeded(SEED):
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
