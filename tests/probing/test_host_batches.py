from __future__ import annotations

import pytest
import torch

from batchfinder.probing import host_batches
from batchfinder.probing.host_batches import bytes_of, make_on_host
from batchfinder.training.sample import BatchMaker


def test_a_batch_that_the_host_cannot_hold_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = BatchMaker((torch.zeros(2, 3), torch.zeros(2), torch.zeros(5, 5)))
    assert bytes_of(batches, 100) == 4 * (100 * 3 + 100 + 25)
    assert make_on_host(batches, 1, 4)[0].shape == (4, 3)
    monkeypatch.setattr(host_batches, "host_memory", lambda: (2000, 1000))
    with pytest.raises(MemoryError, match="the host's memory decides"):
        make_on_host(batches, 1, 100)


def test_batches_of_make_batch_count_by_those_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = BatchMaker(make_batch=lambda size: torch.zeros(size, 3))
    assert make_on_host(batches, 1, 4).shape == (4, 3)
    assert bytes_of(batches, 100) == 4 * 100 * 3
    monkeypatch.setattr(host_batches, "host_memory", lambda: (2000, 1000))
    with pytest.raises(MemoryError, match=r"the batch needs 1\.2 KiB there"):
        make_on_host(batches, 1, 100)


def test_the_first_batch_of_make_batch_is_not_made_either(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make_batch(size: int) -> list[torch.Tensor]:
        made.append(size)
        return [torch.zeros(size, 3), torch.zeros(10)]

    monkeypatch.setattr(host_batches, "host_memory", lambda: (2000, 1000))
    with pytest.raises(MemoryError, match=r"the batch needs 1\.2 KiB there"):
        make_on_host(BatchMaker(make_batch=make_batch), 1, 100)
    assert made == [1, 2]


def test_a_make_batch_is_asked_for_no_smaller_batch_than_the_search_may_try() -> None:
    def make_batch(size: int) -> torch.Tensor:
        return torch.zeros(size // 8, 8).view(size)

    assert make_on_host(BatchMaker(make_batch=make_batch), 16, 16).shape == (16,)
    assert make_on_host(BatchMaker(make_batch=make_batch), 8, 64).shape == (64,)


def test_only_a_batch_too_small_for_a_layer_is_passed_over() -> None:
    made = {1: ValueError("Expected more than 1 value per channel when training, got [1, 4]")}

    def make_batch(size: int) -> torch.Tensor:
        if size in made:
            raise made[size]
        return torch.zeros(size, 3)

    assert make_on_host(BatchMaker(make_batch=make_batch), 1, 4).shape == (4, 3)
    made[2] = ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        make_on_host(BatchMaker(make_batch=make_batch), 1, 4)
