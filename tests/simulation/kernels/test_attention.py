"""Attention whose kernels the user has switched off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from batchfinder.errors import StepError
from batchfinder.estimator import estimate_peak_memory
from batchfinder.simulation.kernels.attention import (
    AttentionBackend,
    choose_backend,
    flash_backward_bytes,
)
from batchfinder.units import MIB

LENGTH = 1024
SCORES = 8 * 4 * LENGTH * LENGTH * 4  # bytes, of 8 examples and 4 heads


class Attention(nn.Module):
    """Four heads, whose kernels are limited within the forward pass where some are named."""

    def __init__(self, *allowed: SDPBackend) -> None:
        super().__init__()
        self.projection = nn.Linear(64, 192)
        self.allowed = list(allowed)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.projection(x).view(-1, LENGTH, 3, 4, 16).permute(2, 0, 3, 1, 4)
        if not self.allowed:
            return F.scaled_dot_product_attention(*heads)
        with sdpa_kernel(self.allowed):
            return F.scaled_dot_product_attention(*heads)


def peak_bytes(model: nn.Module, gpu: str = "h100", **options: Any) -> int:
    estimate = estimate_peak_memory(
        model,
        torch.randn(2, LENGTH, 64),
        batch_size=8,
        gpu=gpu,
        loss_fn=lambda output, batch: output.mean(),
        **options,
    )
    return estimate.peak_allocated_bytes


@pytest.mark.parametrize(
    ("allowed", "capability", "has_mask", "backend"),
    [
        ("MATH", (8, 0), False, "math"),
        ("EFFICIENT_ATTENTION", (8, 0), False, "efficient"),
        ("FLASH_ATTENTION", (8, 0), False, "flash"),
        ("FLASH_ATTENTION", (7, 5), False, None),
        ("FLASH_ATTENTION", (8, 0), True, None),
        ("CUDNN_ATTENTION", (8, 0), False, "flash"),
        ("CUDNN_ATTENTION", (9, 0), True, "efficient"),
        ("CUDNN_ATTENTION", (7, 5), False, None),
        ("MATH CUDNN_ATTENTION", (8, 0), False, "math"),
        ("MATH CUDNN_ATTENTION", (9, 0), False, "flash"),
    ],
)
def test_what_is_switched_off_is_passed_over(
    allowed: str, capability: tuple[int, int], has_mask: bool, backend: str | None
) -> None:
    query = torch.empty(1, 2, 16, 64, dtype=torch.float16, device="meta")
    with sdpa_kernel([getattr(SDPBackend, name) for name in allowed.split()]):
        chosen = choose_backend(query, query, query, has_mask=has_mask, capability=capability)
    assert chosen == (backend and AttentionBackend(backend))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_scores_are_kept_where_the_forward_pass_allows_no_other_kernel(precision: str) -> None:
    fused = peak_bytes(Attention(), precision=precision)
    assert fused < SCORES
    assert peak_bytes(Attention(SDPBackend.MATH), precision=precision) > 2 * SCORES


def test_switches_of_the_process_hold_in_an_estimate() -> None:
    fused = peak_bytes(Attention())
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        assert peak_bytes(Attention()) > fused + SCORES - MIB
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)


def test_where_no_kernel_is_left_the_step_fails_as_it_would_on_the_gpu() -> None:
    allowed = Attention(SDPBackend.FLASH_ATTENTION)  # takes no fp32
    with pytest.raises(StepError, match=r"^No available kernel .*9\.0.*test_attention\.py:\d+"):
        peak_bytes(allowed)
    assert peak_bytes(allowed, precision="bf16") < SCORES


def test_shared_keys_have_gradients_for_each_head_during_flash_attention() -> None:
    query = torch.empty(2, 4, 128, 64, dtype=torch.bfloat16, device="meta")
    alone, shared = (flash_backward_bytes(query, query[:, :heads]) for heads in (4, 2))
    assert shared == [*alone, 2 * 4 * 128 * 64 * 2, 2 * 4 * 128 * 64 * 2]
