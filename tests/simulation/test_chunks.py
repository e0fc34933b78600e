"""Steps that split their batch into chunks; a small batch has only one."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from batchfinder import BatchFinderWarning, estimate_max_batch, estimate_peak_memory
from batchfinder.simulation.tracing.libraries import libraries_simulated

PART = 64
WIDTH = 4096


class InParts(nn.Module):
    """A model that keeps the activations of one chunk at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64))

    def forward(self, rows: Tensor) -> Tensor:
        parts = [
            checkpoint(self.layers, part, use_reentrant=False) for part in torch.split(rows, PART)
        ]
        return torch.cat(parts).square().mean()


def test_many_chunks_need_the_activations_of_one() -> None:
    peak = estimate_peak_memory(InParts(), torch.randn(2, 64), batch_size=4096, gpu="t4")
    assert peak.peak_allocated_bytes < 4096 * WIDTH * 4 / 2
    assert "every batch size is traced separately" in peak.warnings[0]


def test_the_answer_counts_many_chunks() -> None:
    with pytest.warns(BatchFinderWarning, match="every batch size is traced separately"):
        found = estimate_max_batch(
            InParts(), torch.randn(2, 64), gpu="t4", max_batch_size=4096, memory_limit="1900MiB"
        )
    assert found.batch_size == 4096


class ByExample(nn.Module):
    """A model with large weights whose loss loops over the first examples, as TRL's DPO does."""

    def __init__(self, most: int = 10_000) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 2**20), nn.Linear(2**20, 8))
        self.most = most

    def forward(self, rows: Tensor) -> Tensor:
        outputs: Tensor = self.layers(rows)
        first = torch.stack([row.logsumexp(-1) for row in outputs[: self.most]])
        loss: Tensor = first.sum() + outputs[self.most :].exp().sum()
        return loss


@pytest.mark.filterwarnings("error")
def test_a_step_that_loops_over_its_examples_is_traced_at_small_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def peak() -> int:
        sample = torch.randn(2, 32, 64)
        return estimate_peak_memory(ByExample(), sample, batch_size=40, gpu="rtx3090").peak_bytes

    lengthened = peak()
    monkeypatch.setattr("batchfinder.simulation.tracing.step_trace.TRACED_SIZES", (20, 40))
    assert lengthened == peak()


def test_few_sizes_are_tried_where_a_step_loops(recwarn: pytest.WarningsRecorder) -> None:
    found = estimate_max_batch(ByExample(), torch.randn(2, 32, 64), gpu="rtx3090")
    assert found.batch_size == 54
    # 8 is traced anyway. The answer, the next size and half the answer are always tried.
    assert len(found.result.probes) <= 6
    assert not recwarn


def test_a_loop_that_ends_before_the_examples_do_is_found() -> None:
    with pytest.warns(BatchFinderWarning, match="every batch size is traced separately"):
        estimate_max_batch(ByExample(most=10), torch.randn(2, 32, 64), gpu="rtx3090")


def test_two_traced_sizes_are_enough_for_whole_batches(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64))
    sample = torch.randn(2, 64), torch.randn(2, 64)
    assert estimate_max_batch(model, sample, gpu="t4").batch_size > 100_000
    assert not recwarn


def test_trl_projects_few_full_tiles_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("trl.tiles")
    code = (
        "TOKEN_CHUNK_SIZE = 4\n_use_triton = lambda device: False\n"
        "def tiles(tokens): return [*range(0, tokens, TOKEN_CHUNK_SIZE)]"
    )
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "trl.tiles", module)
    with libraries_simulated():
        assert module._use_triton("cpu")
        assert module.tiles(3) == [0]
        assert module.tiles(1001) == [0, 997, 997]
    assert module.tiles(9) == [0, 4, 8]
