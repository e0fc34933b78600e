"""Ways of training: mixed precision, accumulation, shuffled data, torch.compile, Transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from gpu.models import DEVICE, LIMIT, needs_cuda, wide_model, wide_sample
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from batchfinder import Outcome, Status, find_max_batch

pytestmark = needs_cuda


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_fits_more(precision: str) -> None:
    full = find_max_batch(wide_model(), wide_sample(), device=DEVICE, memory_limit=LIMIT)
    mixed = find_max_batch(
        wide_model(), wide_sample(), device=DEVICE, memory_limit=LIMIT, precision=precision
    )

    # Nearly all of its memory are activations, and they halve.
    assert mixed.batch_size > 1.4 * full.batch_size


def test_accumulation_fits_less_where_gradients_are_large() -> None:
    # 128 MiB of gradients, alive during the second forward pass.
    layers = [nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 2048, 10))
    sample = torch.randn(4, 16, 2048), torch.randint(10, (4,))

    single = find_max_batch(model, sample, device=DEVICE, memory_limit=LIMIT, optimizer="sgd")
    accumulated = find_max_batch(
        model, sample, device=DEVICE, memory_limit=LIMIT, optimizer="sgd", accumulate=True
    )

    assert 0 < accumulated.batch_size < 0.97 * single.batch_size


# The compiler warns of what could be faster.
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_confirmed_as_compiled() -> None:
    result = find_max_batch(
        wide_model(), wide_sample(), device=DEVICE, compile=True, max_batch_size=64
    )

    assert (result.batch_size, result.status) == (64, Status.CAPPED)
    assert result.confirmed_steps >= 3


def test_a_language_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, n_positions=64, vocab_size=1000, use_cache=False
    )
    input_ids = torch.randint(1000, (2, 64))
    sample = {"input_ids": input_ids, "labels": input_ids}

    result = find_max_batch(
        transformers.GPT2LMHeadModel(config), sample, memory_limit=LIMIT, precision="bf16"
    )

    assert result.status is Status.FOUND
    assert result.next_failure is not None
    assert result.next_failure.outcome is Outcome.OOM
    assert not any("loss" in warning for warning in result.warnings)


def test_the_states_of_8_bit_optimizers_are_counted_unless_they_are_paged() -> None:
    optimizers = pytest.importorskip("bitsandbytes").optim
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))

    def peak_bytes(maker: Any) -> int:
        result = find_max_batch(
            *(model, torch.ones(2, 1024)),
            loss_fn=lambda output, _: output.mean(),
            optimizer=maker,
            device=DEVICE,
            max_batch_size=8,
        )
        return result.probes[-1].peak_allocated_bytes or 0

    makers = optimizers.AdamW, optimizers.AdamW8bit, optimizers.PagedAdamW8bit
    peaks = [peak_bytes(maker) for maker in makers]
    plain, packed = (peaks[0] - peaks[2]) / 2**27, (peaks[1] - peaks[2]) / 2**27
    assert (round(plain, 1), round(packed, 1)) == (2.0, 0.5)  # of the bytes of the weights


def test_a_shuffled_loader_leaves_the_random_numbers_of_the_device() -> None:
    texts: Any = [torch.ones(length, 256) for length in range(1, 9)]
    padded = partial(pad_sequence, batch_first=True)
    loader = DataLoader(texts, batch_size=2, shuffle=True, collate_fn=padded)
    torch.cuda.manual_seed(7)

    find_max_batch(
        nn.Linear(256, 256), loader, loss_fn=lambda output, _: output.sum(), max_batch_size=2
    )

    assert torch.cuda.initial_seed() == 7
