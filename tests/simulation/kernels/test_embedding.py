"""What the gradient of an embedding takes, as PyTorch's CUDA kernels do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchfinder import TrainingSetup, estimate_peak_memory
from batchfinder.simulation.kernels.embedding import group_bytes

ENTRIES, WIDTH, LENGTH = 4096, 1024, 1024


class Lookup(nn.Module):
    """The sum of some entries of a table."""

    def __init__(self, kind: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.table = kind(ENTRIES, WIDTH, **options)

    def forward(self, places: Tensor) -> Tensor:
        output: Tensor = self.table(places)
        return output.sum()


def peak_bytes(batch_size: int, kind: type[nn.Module], **options: Any) -> int:
    setup = TrainingSetup(
        Lookup(kind, **options), torch.zeros(1, LENGTH, dtype=torch.long), optimizer="sgd"
    )
    return estimate_peak_memory(setup, batch_size=batch_size, gpu="h100").peak_allocated_bytes


def test_rows_are_summed_in_groups_of_ten_but_no_more_than_there_are_entries() -> None:
    assert group_bytes(3072, entries=ENTRIES, width=1, at_once=3072) == 0
    assert group_bytes(3073, entries=ENTRIES, width=1, at_once=3072) == (307 + 3073) * 4
    assert group_bytes(10**6, entries=ENTRIES, width=1) == (10**5 + ENTRIES) * 4


# Read off PyTorch 2.11 on the counting runtime of scripts/counting_cuda. The last size is far above
# those that are traced, where there are fewer rows than entries.
@pytest.mark.parametrize(
    ("batch_size", "measured"), [(3, 46_162_944), (4, 69_441_024), (64, 348_280_320)]
)
def test_an_embedding_peaks_with_the_sums_of_its_groups(batch_size: int, measured: int) -> None:
    assert peak_bytes(batch_size, nn.Embedding) == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize(("mode", "measured"), [("sum", 80_632_320), ("max", 35_391_488)])
def test_bags_have_groups_unless_they_pick_the_largest(mode: str, measured: int) -> None:
    assert peak_bytes(64, nn.EmbeddingBag, mode=mode) == pytest.approx(measured, rel=0.01)
