from __future__ import annotations

import pytest
import torch

from batchfinder.probing import host_batches
from batchfinder.probing.host_batches import bytes_of, make_on_host
from batchfinder.training.sample import BatchMaker


def test_a_batch_that_the_host_cannot_hold_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = BatchMaker((torch.zeros(2, 3), torch.zeros(2), torch.zeros(5, 5)))
    assert bytes_of(batches, 100) == 4 * (100 * 3 + 100 + 25)
    assert make_on_host(batches, 4)[0].shape == (4, 3)
    monkeypatch.setattr(host_batches, "host_memory", lambda: (2000, 1000))
    with pytest.raises(MemoryError, match="the host's memory decides"):
        make_on_host(batches, 100)


def test_batches_of_make_batch_count_by_those_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = BatchMaker(make_batch=lambda size: torch.zeros(size, 3))
    assert make_on_host(batches, 4).shape == (4, 3)
    assert bytes_of(batches, 100) == 4 * 100 * 3
    monkeypatch.setattr(host_batches, "host_memory", lambda: (2000, 1000))
    with pytest.raises(MemoryError, match=r"the batch needs 1\.2 KiB there"):
        make_on_host(batches, 100)


def test_the_first_batch_of_make_batch_is_not_made_either(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make_batch(size: int) -> list[torch.Tensor]:
        made.append(size)
        return [torch.zeros(size, 3), torch.zeros(10)]

    monkeypatch.setattr(host_batches, "host_memory", lambda: (2000, 1000))
    with pytest.raises(MemoryError, match=r"the batch needs 1\.2 KiB there"):
        make_on_host(BatchMaker(make_batch=make_batch), 100)
    assert made == [1, 2]


def test_a_make_batch_that_makes_no_small_batch_is_asked_for_the_size_itself() -> None:
    def make_batch(size: int) -> torch.Tensor:
        return torch.zeros(size // 8, 8).view(size)

    assert make_on_host(BatchMaker(make_batch=make_batch), 16).shape == (16,)
