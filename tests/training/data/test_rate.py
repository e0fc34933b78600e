"""The speed of a loader by itself."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from batchfinder import BatchFinderWarning, find_max_batch
from batchfinder.results.throughput import throughput_of
from batchfinder.search.remarks import loader_remarks
from batchfinder.training.data.rate import samples_per_second


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> Tensor:
        time.sleep(0.002)
        return torch.zeros(3)


@pytest.mark.parametrize("loader", [DataLoader(Slow(), 4), Slow()])
def test_a_slow_loader_is_measured_and_named_as_the_limit(loader: object) -> None:
    rate = samples_per_second(loader, 0.1)
    assert 100 < rate < 500
    steps = throughput_of([{8: [0.01] * 4}])  # 800 samples a second
    (text,) = loader_remarks(rate, steps)
    assert "the data loader is the limit" in text
    assert "steps at 8 train on 800. Try more num_workers" in text
    assert not loader_remarks(900.0, steps)


@pytest.mark.parametrize("name", ["sample", "loader"])
def test_a_search_from_python_names_a_slow_loader(name: str) -> None:
    loader = DataLoader(Slow(), 4, shuffle=True, generator=torch.Generator().manual_seed(7))
    before = loader.generator.get_state().clone()
    given: dict[str, Any] = {name: loader}
    with pytest.warns(BatchFinderWarning, match="the data loader is the limit"):
        find_max_batch(nn.Linear(3, 3), device="cpu", max_batch_size=8, throughput=True, **given)
    assert torch.equal(loader.generator.get_state(), before)
