"""Known values of tensors without data: those that depend on the batch alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from without_data import IDS, without_data

from batchfinder import TrainingSetup, estimate_max_batch, estimate_peak_memory
from batchfinder.errors import StepError
from batchfinder.simulation.kernels.attention import FAMILIES
from batchfinder.simulation.kernels.workspaces import CudaWorkspaces
from batchfinder.simulation.trace.trace import Stage
from batchfinder.simulation.tracing.fake import fake_cuda
from batchfinder.simulation.tracing.tracker import StorageTracker
from batchfinder.simulation.values.known import MOST_ELEMENTS, know
from batchfinder.simulation.values.unknown import ValueUnknownError

REFUSED = (DataDependentOutputException, ValueUnknownError)

READS: dict[str, Callable[[Tensor], Any]] = {
    "largest": lambda x: x.max().item(),
    "any": lambda x: bool((x > 5).any()),
    "in an if": lambda x: 1 if (x < 0).all() else 2,
    "list": lambda x: x.sum(-1, keepdim=True).tolist(),
    "mask": lambda x: x[x > 2].tolist(),
    "places": lambda x: [column.tolist() for column in torch.where(x.view(2, 4) > 2)],
    "unique": lambda x: x.unique().tolist(),  # type: ignore[no-untyped-call]
    "selected": lambda x: x.masked_select(x % 2 == 0).tolist(),
    "repeated": lambda x: torch.repeat_interleave(torch.arange(8), x).numel(),
    "new tensors": lambda x: (torch.arange(8) + torch.ones_like(x) * 2 + x.new_full((8,), 3))[1],
    "literal": lambda x: (x == torch.tensor([3, 4])[0]).nonzero().tolist(),
    "filled": lambda x: torch.empty(3).fill_(5).tolist() + x.new_empty(2).copy_(x[:2]).tolist(),
    "in place": lambda x: x.clone().fill_(7).sum().item(),
    "through a view": lambda x: _written_through_a_view(x.clone()).tolist(),
    "equal": lambda x: torch.equal(x, x + 0),
    "type": lambda x: (x.float() / 2).int().tolist(),
    "length": lambda x: torch.zeros(int(x.max()), 2).shape[0],
    "large mask": lambda x: _large_mask(x).clone().float()[:, 0, 0].sum(-1).tolist(),
    "row of a large mask, written to": lambda x: _with_a_row(_large_mask(x))[0].sum(-1).tolist(),
}


def _large_mask(x: Tensor) -> Tensor:
    """Return a mask of all pairs of positions, with more elements than are kept one by one."""
    side = math.isqrt(MOST_ELEMENTS // 4)
    positions = torch.ones(1, 1, side, 1, dtype=torch.bool)
    return positions & (x > 2).view(8, 1, 1, 1).expand(8, 1, 1, side)


def _with_a_row(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row of a mask after a write to it, and the second one."""
    row = mask[:, 0, 0]
    row[~row] = True
    return row, mask[:, 0, 1]


def _written_through_a_view(x: Tensor) -> Tensor:
    x.view(2, 4)[1].add_(10)
    x[0] = 7
    return x


@pytest.mark.parametrize("name", list(READS))
def test_values_of_the_batch_can_be_read(name: str) -> None:
    expected = READS[name](IDS.clone())
    with without_data() as ids:
        found = READS[name](ids)
        found = found.item() if isinstance(found, Tensor) else found
    assert found == (expected.item() if isinstance(expected, Tensor) else expected)


@pytest.mark.parametrize(
    "unknown",
    [
        lambda x: x + torch.randint(0, 9, (8,)),
        lambda x: F.dropout(x.float()),
        lambda x: x.float() + torch.randn(8),
        lambda x: x.float().add_(torch.randn(8)),
        lambda x: _viewed_and_written(x.float()),
        lambda x: torch.cat([x, torch.randn(1)]),
        lambda x: torch.add(torch.randn(8), 1, out=x.float()),
        lambda x: torch.empty(8).copy_(torch.randn(8)),
        lambda x: x.float().normal_(),
        lambda x: torch.where(torch.randn(8) > 0, x, x + 1),
        lambda x: x.expand(MOST_ELEMENTS, 8) + x,
        lambda x: _with_a_row(_large_mask(x))[1].sum(-1),
    ],
)
def test_other_values_are_unknown(unknown: Callable[[Tensor], Tensor]) -> None:
    with without_data() as ids, pytest.raises(REFUSED):
        int(unknown(ids).max().item())  # a float may be logged, but decides nothing


def _viewed_and_written(x: Tensor) -> Tensor:
    x.view(2, 4)[0].copy_(torch.randn(4))
    return x


@pytest.mark.parametrize("elements", [8, 2 * MOST_ELEMENTS])
def test_unknown_values_count_as_finite(elements: int) -> None:
    with without_data():
        x = torch.randn(elements)
        assert torch.isfinite(x).all()
        assert not torch.isnan(x).any()
        assert not (torch.isinf(x) | torch.isnan(x)).any().item()
        with pytest.raises(DataDependentOutputException):
            (x != 0).any().item()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_copy_of_a_known_tensor_has_its_own_storage() -> None:
    with without_data() as ids:
        copied = copy.deepcopy(ids)
        copied.zero_()
        assert ids.tolist() == IDS.tolist()


class Tagger(nn.Module):
    """A model that reads values of its batch, as those of Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.head = nn.Linear(64, 100)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= 100:
            raise ValueError("a label is out of range")
        labels[labels == 0] = -100  # writes to its batch
        hidden = self.embedding(ids)
        if not torch.isfinite(hidden).all():
            hidden = hidden.clamp(-1, 1)
        chosen = labels != -100
        return F.cross_entropy(self.head(hidden[chosen]), labels[chosen])


def tagged(labels: int) -> dict[str, Tensor]:
    """Return two texts of 10 tokens, ``labels`` of them labeled in each."""
    targets = torch.zeros(2, 10, dtype=torch.int64)
    targets[:, :labels] = 7
    return {"ids": torch.randint(0, 100, (2, 10)), "labels": targets}


def test_a_step_may_index_with_its_labels() -> None:
    growths = []
    for labels in (4, 8):
        sample = tagged(labels)
        before = sample["labels"].clone()
        peaks = [
            estimate_peak_memory(Tagger(), sample, batch_size=size, gpu="t4").peak_allocated_bytes
            for size in (1000, 2000)
        ]
        growths.append((peaks[1] - peaks[0]) / 1000)
        assert sample["labels"].equal(before)
    # Four more rows of hidden states and logits, and their memory in the backward pass.
    assert 4 * (64 + 100) * 4 < growths[1] - growths[0] < 4 * (64 + 100) * 4 * 4


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_validation_may_read_its_batch(mode: Any) -> None:
    class SkipsAFullMask(nn.Module):
        """As transformers 4 decides whether it needs a mask."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, values: Tensor, mask: Tensor) -> Tensor:
            values = self.scale * values
            return values.sum() if mask.all() else (values.exp() * mask).sum()

    sample = {"values": torch.zeros(2, 1 << 20), "mask": torch.ones(2, 1, dtype=torch.bool)}
    of_eval = None if mode == "eval" else 16
    setup = TrainingSetup(SkipsAFullMask(), sample)
    estimate = estimate_peak_memory(
        setup, batch_size=8, gpu="h100", mode=mode, eval_batch_size=of_eval
    )
    assert estimate.peak_allocated_bytes >= (1 << 22) * (32 if of_eval else 16)


def test_a_label_out_of_range_is_an_error() -> None:
    with pytest.raises(ValueError, match="a label is out of range"):
        estimate_max_batch(Tagger(), tagged(4) | {"labels": torch.full((2, 10), 100)}, gpu="t4")


def test_randomly_skipped_layers_are_counted() -> None:
    class Dropped(nn.Module):
        def __init__(self, skips: float) -> None:
            super().__init__()
            self.skips = skips
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand([]) >= self.skips:
                    x = layer(x).relu()
            return x

    sample = torch.randn(2, 64), torch.randn(2, 64)
    peaks = {
        estimate_peak_memory(Dropped(skips), sample, batch_size=5000, gpu="t4").peak_allocated_bytes
        for skips in (0.0, 0.5)
    }
    assert len(peaks) == 1


@pytest.mark.parametrize("joined", [False, True])
def test_the_table_of_ctc_is_as_wide_as_the_longest_target(joined: bool) -> None:
    lengths = torch.tensor([10, 3])
    workspaces = CudaWorkspaces((8, 0), set(FAMILIES))
    with fake_cuda((8, 0)), StorageTracker(1, nn.Identity(), workspaces) as tracker:
        scores = torch.randn(50, 2, 20).requires_grad_()
        known = torch.empty(2, dtype=torch.int64)
        know(known, lengths)
        targets = torch.ones(*((13,) if joined else (2, 12)), dtype=torch.int64)
        tracker.begin_step()
        F.ctc_loss(scores.log_softmax(-1), targets, torch.full((2,), 50), known).backward()  # type: ignore[no-untyped-call]
    table = 2 * 50 * (2 * 10 + 1) * 4
    assert [s.stage for s in tracker.trace.storages if s.size_bytes == table] == [
        Stage.FORWARD,
        Stage.BACKWARD,
    ]


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="PyTorch has none before 2.8")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_expert_products_are_padded_to_16_bytes(dtype: torch.dtype) -> None:
    with fake_cuda((9, 0)), StorageTracker(1, nn.Identity()) as tracker:
        tokens = torch.randn(100, 32, dtype=dtype)
        experts = torch.randn(4, 32, 33, dtype=dtype)
        ends = torch.tensor([25, 50, 75, 100], dtype=torch.int32)
        output = torch._grouped_mm(tokens, experts, offs=ends)
    assert output.shape == (100, 33)
    aligned = 36 if dtype is torch.float32 else 40
    assert output.stride() == (aligned, 1)
    assert tracker.trace.storages[-1].size_bytes == 100 * aligned * dtype.itemsize


class Speller(nn.Module):
    """A recurrent model for texts of different lengths."""

    def __init__(self, packs: bool) -> None:
        super().__init__()
        self.packs = packs
        self.layer = nn.LSTM(32, 256, num_layers=2, batch_first=True)

    def forward(self, texts: Tensor, lengths: Tensor) -> Tensor:
        if not self.packs:
            output: Tensor = self.layer(texts)[0]
            return output
        packed = nn.utils.rnn.pack_padded_sequence(
            texts, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        padded, found = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        assert found.tolist() == lengths.tolist()
        return padded


def test_packed_sequences_have_the_total_length() -> None:
    peaks = {}
    for name, packs, lengths in (
        ("padded", False, [50, 50]),
        ("packed", True, [50, 50]),
        ("short", True, [50, 10]),
    ):
        sample = {"texts": torch.randn(2, 50, 32), "lengths": torch.tensor(lengths)}
        peaks[name] = estimate_peak_memory(
            Speller(packs), sample, batch_size=1000, gpu="t4", optimizer="sgd"
        ).peak_allocated_bytes
    kept = 4 * 1000 * 50 * 256 * (2 * 5 + 1)  # by cuDNN, of two layers
    assert peaks["packed"] > kept
    # Activations shrink with the tokens; the padded output does not.
    assert 0.35 * kept < peaks["packed"] - peaks["short"] < 0.6 * kept


def test_buffers_are_known_except_statistics() -> None:
    class Anchored(nn.Module):
        order: Tensor
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.anchors = [torch.tensor([0.2, 0.6, 0.9])]
            self.register_buffer("order", torch.tensor([2, 0, 1]))
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor, reads_mean: Tensor) -> Tensor:
            assert self.order.tolist() == [2, 0, 1]
            chosen = self.anchors[0] > 0.5
            if reads_mean.any():
                assert self.mean.sum().item() == 0
            return self.layer(x)[:, : int(chosen.sum())].sum()  # type: ignore[no-any-return]

    sample = {"x": torch.randn(2, 8), "reads_mean": torch.tensor([False, False])}
    before = copy.deepcopy(Anchored().state_dict())
    assert estimate_peak_memory(Anchored(), sample, batch_size=4, gpu="t4").fits
    assert Anchored().state_dict()["order"].equal(before["order"])
    sample["reads_mean"] = ~sample["reads_mean"]
    with pytest.raises(StepError, match="the step reads a value of a tensor"):
        estimate_peak_memory(Anchored(), sample, batch_size=4, gpu="t4")


def test_a_single_random_number_is_the_highest() -> None:
    with without_data():
        assert torch.randint(3, 10, (1,)).item() == 9
        assert 1.99 < torch.empty(1).uniform_(1, 2).item() < 2
        with pytest.raises(DataDependentOutputException):
            torch.randint(3, 10, (2,)).max().item()
