"""The batches that are tried of a Trainer: as long as any that it will train on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset
from training.frameworks.trainers import Example, Texts, Trainer, collate, opened

from batchfinder import estimate_max_batch, find_max_batch
from batchfinder.errors import SampleError
from batchfinder.training.data import lengths
from batchfinder.training.data.lengths import FIRST_EXAMPLES, MOST_EXAMPLES, spread
from batchfinder.training.frameworks.trainer_batch import batches_of_trainer


class Uneven(Texts):
    """The longest inputs and the longest labels are not of the same example."""

    def __getitem__(self, place: int) -> Example:
        example = super().__getitem__(place)
        return {**example, "labels": [1] * (9 if place == 5 else 2)}


def test_the_batch_is_as_long_as_any_in_training() -> None:
    setup, warnings = opened(Trainer(Texts(300, longest_at=299)))
    assert setup.sample["input_ids"].shape[1] == 7
    setup, _ = opened(Trainer(Uneven(20, longest_at=3)))
    assert (setup.sample["input_ids"].shape[1], setup.sample["labels"].shape[1]) == (7, 9)
    assert warnings == []


def test_where_all_are_of_one_length_few_are_looked_at() -> None:
    dataset = Texts(10 * MOST_EXAMPLES)
    _, warnings = opened(Trainer(dataset))
    assert len(dataset.seen) <= FIRST_EXAMPLES + 2
    assert warnings == []


def test_of_many_that_differ_all_are_looked_at() -> None:
    places = spread(2 * MOST_EXAMPLES, MOST_EXAMPLES)
    left_out = max({*range(2 * MOST_EXAMPLES)}.difference(places))
    setup, warnings = opened(Trainer(Texts(2 * MOST_EXAMPLES, longest_at=left_out)))
    assert setup.sample["input_ids"].shape[1] == 7
    assert warnings == []


def test_of_many_that_take_long_to_read_some_are_looked_at_and_the_user_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lengths, "READING_SECONDS", 0)
    *_, last = spread(2 * MOST_EXAMPLES, MOST_EXAMPLES)
    dataset = Texts(2 * MOST_EXAMPLES, longest_at=last)
    setup, (warning,) = opened(Trainer(dataset))
    assert setup.sample["input_ids"].shape[1] == 7
    assert max(dataset.seen) > 1.9 * MOST_EXAMPLES
    assert "the longest of 2048 examples of the Trainer's 4096" in warning


class Stream(IterableDataset[Example]):
    def __iter__(self) -> Iterator[Example]:
        yield from Texts(8, longest_at=2)  # type: ignore[misc]


class UsedUp(Stream):
    def __init__(self) -> None:
        self.left = super().__iter__()

    def __iter__(self) -> Iterator[Example]:
        return self.left


def test_of_a_stream_the_longest_comes_first() -> None:
    setup, (warning,) = opened(Trainer(Stream()))
    assert "the longest of 2048 examples of the Trainer's stream" in warning
    assert setup.make_batch is not None
    assert [setup.make_batch(2, step)["input_ids"].shape[1] for step in range(4)] == [7, 2, 7, 3]


def test_of_one_that_is_used_up_the_first_batch_is_taken_and_the_user_is_told() -> None:
    setup, (warning,) = opened(Trainer(UsedUp()))
    assert setup.sample["input_ids"].shape == (4, 7)
    assert "if others are longer, search with the longest alone" in warning


class Noisy(Dataset[Example]):
    """Texts whose examples and lengths depend on random generators of its own."""

    def __init__(self) -> None:
        self.lengths = random.Random(1)
        self.transform = SimpleNamespace(tokens=random.Random(2))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> Example:
        tokens = self.transform.tokens.choices(range(10), k=self.lengths.randint(1, 9))
        return {"input_ids": tokens, "labels": tokens}


class NoisyStream(IterableDataset[Example]):
    def __init__(self) -> None:
        self.noisy = Noisy()

    def __iter__(self) -> Iterator[Example]:
        yield from (self.noisy[place] for place in range(8))


@pytest.mark.parametrize("kind", [Noisy, NoisyStream])
def test_random_generators_of_the_data_are_as_before(kind: Any) -> None:
    trainer, unsearched = Trainer(kind()), Trainer(kind())
    find_max_batch(trainer, device="cpu", max_batch_size=3)
    expected = [batch["input_ids"].tolist() for batch in unsearched.get_train_dataloader()]
    assert [batch["input_ids"].tolist() for batch in trainer.get_train_dataloader()] == expected


def test_a_trainer_without_examples_is_refused() -> None:
    with pytest.raises(SampleError, match="train_dataset has no examples"):
        opened(Trainer(Texts(0)))


class Pairs:
    """Collates each example into two rows, as for preferences; or all of them into one."""

    def __init__(self, *, joined: bool) -> None:
        self.joined = joined

    def __call__(self, examples: list[Example]) -> dict[str, Tensor]:
        batch = collate(examples + examples)
        for example in examples:
            del example["labels"]  # collators may change what they are given
        if self.joined:
            return {name: values.flatten()[None] for name, values in batch.items()}
        return batch


@pytest.mark.parametrize("joined", [False, True])
def test_a_batch_counts_examples_where_the_collator_makes_other_rows_of_them(joined: bool) -> None:
    trainer = Trainer(Texts(20, longest_at=3), collate=Pairs(joined=joined))
    setup, warnings = opened(trainer)
    assert warnings == []
    assert setup.make_batch is not None
    for size in (3, 8):
        batch = setup.make_batch(size, 0)
        rows, tokens = (1, 2 * size * 7) if joined else (2 * size, 7)
        assert batch["input_ids"].shape == (rows, tokens)
    assert estimate_max_batch(trainer, gpu="t4", max_batch_size=8).batch_size == 8


class Picture:
    """As PIL's: its size is a pair, and it has no length."""

    def __init__(self, width: int) -> None:
        self.size = (width, 10)


class Wrapped:
    """An example that is neither a dict nor a sequence."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    "value",
    [
        lambda length: [0] * length,
        lambda length: "a" * length,
        lambda length: torch.zeros(3, length),
        lambda length: np.zeros((3, length)),
        lambda length: [torch.zeros(length)],
        lambda length: [[0] * length, [0]],
        lambda length: {"inner": [0] * length},
        Picture,
        lambda length: [Picture(length)],
    ],
)
@pytest.mark.parametrize("wrapped", [dict, tuple, Wrapped], ids=lambda kind: kind.__name__)
def test_values_of_many_kinds_have_a_length(value: Any, wrapped: Any) -> None:
    kinds = {dict: lambda made: {"x": made}, tuple: lambda made: (made,), Wrapped: Wrapped}
    asked_for = []

    class Data:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, place: int) -> Any:
            asked_for.append(place)
            return kinds[wrapped](value(9 if place == 5 else 2 + place % 3))

    batches_of_trainer(Trainer(Data(), collate=lambda examples: torch.zeros(len(examples), 2)))
    assert 5 in asked_for[20:]  # after all have been looked at


class OfOneDataSet:
    """Indices of batches that are each of one of two data sets, as for several tasks at once."""

    batch_size = 4

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2, 3], [20, 21, 22, 23])


def test_batches_of_several_data_sets_are_not_mixed() -> None:
    class Pairs(Texts):
        def __getitem__(self, place: int) -> Example:
            return {"premises": [1] * (12 if place == 9 else 2)}

    class OfTwo(Trainer):
        def get_train_dataloader(self) -> Any:
            parts: list[Any] = [Texts(20, longest_at=3), Pairs(10), Texts(0)]
            sampler: Any = OfOneDataSet()
            dataset: Any = ConcatDataset(parts)
            return DataLoader(dataset, batch_sampler=sampler, collate_fn=self.data_collator)

    setup, warnings = opened(OfTwo())
    make_batch: Any = setup.make_batch
    batches = [make_batch(2, step) for step in range(10)]
    kinds = ["input_ids", "premises"] * 5
    assert [next(iter(batch)) for batch in batches] == kinds
    lengths = [batch[kind].shape[1] for kind, batch in zip(kinds, batches, strict=True)]
    assert lengths[:2] == [7, 12]  # the longest of each, those with most elements first
    assert min(lengths[2::2]) < 7  # then others of it, as drawn
    assert min(lengths[3::2]) < 12
    assert (setup.examples, warnings) == (30, [])


def test_the_data_do_not_go_to_a_worker() -> None:
    trainer: Any = Trainer()
    trainer.accelerator = SimpleNamespace(_dataloaders=["earlier"])
    get_train_dataloader = trainer.get_train_dataloader

    def noted() -> Any:
        trainer.accelerator._dataloaders.append(loader := get_train_dataloader())
        return loader

    trainer.get_train_dataloader = noted
    opened(trainer)
    assert trainer.accelerator._dataloaders == ["earlier"]


def test_a_loader_whose_first_batch_was_taken_is_told_its_end() -> None:
    ended = []

    class Shard(DataLoader[Any]):
        def end(self) -> None:
            ended.append(self)

    trainer = Trainer()
    trainer.get_train_dataloader = lambda: Shard(UsedUp(), batch_size=2, collate_fn=collate)  # type: ignore[method-assign]
    opened(trainer)
    assert len(ended) == 1


def test_those_seen_lie_evenly_over_the_data_set() -> None:
    dataset = Texts(10 * MOST_EXAMPLES)
    opened(Trainer(dataset))
    seen = sorted(set(dataset.seen))
    assert max(b - a for a, b in zip(seen, [*seen[1:], 10 * MOST_EXAMPLES], strict=True)) < 1025
