"""Streams: data sets without places, whose first examples are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from batchfinder.training.complete_setup import completed
from batchfinder.training.data.lengths import FIRST_EXAMPLES, MOST_EXAMPLES
from batchfinder.training.data.stream import Beginning, read_by_place
from batchfinder.training.setup import TrainingSetup


class Stream(IterableDataset[list[int]]):
    """Texts of some lengths in turn; notes how many were read."""

    def __init__(self, lengths: Any) -> None:
        self.lengths, self.read = lengths, 0

    def __iter__(self) -> Iterator[list[int]]:
        for length in self.lengths:
            self.read += 1
            yield [1] * length


class Endless(Stream):
    def __iter__(self) -> Iterator[list[int]]:
        self.lengths = itertools.cycle(range(1, 10))
        return super().__iter__()


class UsedUp(Stream):
    """Gives what is left of one iterator."""

    def __iter__(self) -> Iterator[list[int]]:
        self.left = getattr(self, "left", None) or super().__iter__()
        return self.left


def padded(texts: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, texts))
    return torch.tensor([text + [0] * (longest - len(text)) for text in texts])


def test_few_are_read_where_all_are_of_one_length() -> None:
    stream = Stream([5] * 10_000)
    assert read_by_place(stream) == [[1] * 5] * FIRST_EXAMPLES
    assert stream.read == FIRST_EXAMPLES + 1


def test_many_are_read_where_lengths_differ_and_it_may_never_end() -> None:
    examples = read_by_place(Endless(()))
    assert isinstance(examples, Beginning)
    assert len(examples) == MOST_EXAMPLES


def test_a_whole_stream_is_a_list_and_an_empty_one_too() -> None:
    examples = read_by_place(Stream([3, 1, 2]))
    assert [len(each) for each in examples] == [3, 1, 2]
    assert not isinstance(examples, Beginning)
    assert read_by_place(Stream([])) == []


def test_what_would_be_used_up_is_not_read() -> None:
    stream = UsedUp([1, 2, 3])
    assert read_by_place(stream) is stream
    assert stream.read == 0


def test_a_search_trains_on_the_longest_and_on_others_as_they_come() -> None:
    loader: Any = DataLoader(Endless(()), batch_size=4, collate_fn=padded)
    setup, (warning,) = completed(TrainingSetup(torch.nn.Identity(), loader=loader))
    assert "the longest of 2048 examples of the loader's stream; if others are longer" in warning
    assert setup.make_batch is not None
    assert [tuple(setup.make_batch(3, step).shape) for step in range(4)] == [
        (3, 9), (3, 3), (3, 6), (3, 9),
    ]  # fmt: skip
    assert setup.make_batch(5000, 1).shape == (5000, 9)  # no more examples than a stream may have
