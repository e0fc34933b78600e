"""The heaviest batch of a data set whose examples vary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from batchfinder.errors import SampleError, UsageError
from batchfinder.studies.worst_batch import worst_batch


class Pairs(Dataset[Any]):
    """Inputs and targets, the longest of each in different examples."""

    lengths = ((3, 2), (40, 1), (5, 30), (7, 4), (20, 20))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.rand(length) for length in self.lengths[place])  # type: ignore[return-value]


def pad(examples: list[Any]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*examples, strict=True)
    return pad_sequence(list(inputs), batch_first=True), pad_sequence(
        list(targets), batch_first=True
    )


@pytest.mark.parametrize("size", [2, 3, 12])
def test_no_shuffled_batch_is_heavier(size: int) -> None:
    loader = DataLoader(Pairs(), size, collate_fn=pad, shuffle=True)
    worst = [tensor.shape for tensor in worst_batch(loader, size)]
    assert worst == [(size, 40), (size, 30)]
    for _ in range(10):
        for batch in loader:
            assert all(
                tensor.numel() <= shape.numel() for tensor, shape in zip(batch, worst, strict=True)
            )


def test_boxes_count_and_the_generator_is_left_alone() -> None:
    data = [(torch.zeros(3, 8, 8), {"boxes": torch.zeros(n, 4)}) for n in (1, 9, 4)]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    batch = worst_batch(data, 2, collate_fn=list)
    worst_batch(Pairs(), 2, collate_fn=pad)
    assert [len(target["boxes"]) for _, target in batch] == [9, 4]
    assert torch.equal(torch.get_rng_state(), before)


def test_data_without_places_is_refused() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(1)

    with pytest.raises(SampleError, match="Stream has no examples by their place"):
        worst_batch(DataLoader(Stream()), 2)
    with pytest.raises(SampleError, match="the data set has no examples"):
        worst_batch([], 2)
    with pytest.raises(UsageError, match="at least 1, not 0"):
        worst_batch([torch.zeros(1)], 0)
