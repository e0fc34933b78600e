"""Workspaces of convolutions, as real GPUs were seen to use them."""

from __future__ import annotations

import pytest
import torch

from batchfinder.simulation.kernels.convolution import Convolution, Direction
from batchfinder.units import MIB

V100, H100 = (7, 0), (9, 0)


def convolution(
    batch: int, channels: int, filters: int, kernel: int, pixels: int, stride: int = 1,
    *, dtype: torch.dtype = torch.float32,
) -> Convolution:  # fmt: skip
    side = pixels // stride
    with torch.device("meta"):
        images = torch.empty(batch, channels, pixels, pixels, dtype=dtype)
        outputs = torch.empty(batch, filters, side, side, dtype=dtype)
        weight = torch.empty(filters, channels, kernel, kernel, dtype=dtype)
    return Convolution(images, outputs, weight, [stride] * 2, [1] * 2)


# Read off a V100 that trained ResNet-50 with 32 examples.
@pytest.mark.parametrize(
    ("shape", "direction", "recorded"),
    [
        ((64, 64, 3, 56), Direction.OUTPUT, 410_112),
        ((64, 64, 3, 56), Direction.WEIGHT, 116_195_328),
        ((512, 512, 3, 7), Direction.IMAGES, 56_623_104),
        ((256, 64, 1, 56), Direction.IMAGES, 102_847_488),
        ((1024, 256, 1, 14), Direction.IMAGES, 0),
        ((3, 64, 7, 224, 2), Direction.OUTPUT, 114_176),
    ],
)
def test_convolutions_in_fp32_use_what_they_used_on_a_v100(
    shape: tuple[int, ...], direction: Direction, recorded: int
) -> None:
    assert abs(convolution(32, *shape).workspace_bytes(direction, V100) - recorded) <= MIB


def test_a_patch_embedding_in_half_precision_is_padded_to_eight_channels() -> None:
    patches = convolution(4, 3, 768, 16, 224, 16, dtype=torch.bfloat16)
    # Recorded on an H100.
    assert abs(patches.workspace_bytes(Direction.OUTPUT, H100) - 7_561_728) <= 512


def test_without_cudnn_one_example_is_unfolded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    many, few = (convolution(batch, 64, 128, 3, 56) for batch in (32, 1))
    unfolded = 64 * 3 * 3 * 56 * 56 * 4
    for direction in Direction:
        assert many.workspace_bytes(direction, H100) == unfolded
        assert few.workspace_bytes(direction, V100) == unfolded
    assert not convolution(32, 64, 128, 1, 56).workspace_bytes(Direction.OUTPUT, H100)
