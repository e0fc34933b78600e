"""Masks with known values, with a stand-in for transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from batchfinder import TrainingSetup, estimate_peak_memory


def is_fake_tensor(x: Any) -> bool:
    return isinstance(x, FakeTensor)


@pytest.fixture
def looks_at_values(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stand in for the part of transformers that decides whether to read a mask."""
    module = ModuleType("transformers.utils.import_utils")
    module.is_fake_tensor = is_fake_tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


class Masked(nn.Module):
    """A model that keeps a second copy of its values if it has to make a mask."""

    def __init__(self, module: ModuleType, own_mask: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.ask: Callable[[Any], bool] = lambda x: vars(module)["is_fake_tensor"](
            x
        )  # as it is then
        self.own_mask = own_mask

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        values = values * self.scale
        if self.own_mask:
            mask = (values > 0).all(1, keepdim=True) & mask  # to read it would be refused
        if not self.ask(mask) and mask.all():
            return values.sum()
        return (values.exp() * mask).sum()


def peak_bytes(model: Masked, mask: Tensor) -> int:
    sample = {"values": torch.zeros(2, 1 << 20), "mask": mask}
    estimate = estimate_peak_memory(TrainingSetup(model, sample), batch_size=8, gpu="h100")
    return estimate.peak_allocated_bytes


def test_no_mask_is_made_if_the_batch_masks_nothing(looks_at_values: ModuleType) -> None:
    nothing, some = torch.ones(2, 1, dtype=torch.bool), torch.tensor([[True], [False]])
    model = Masked(looks_at_values)

    assert peak_bytes(model, nothing) < peak_bytes(model, some)
    assert looks_at_values.is_fake_tensor is is_fake_tensor


def test_an_unknown_mask_is_not_read(looks_at_values: ModuleType) -> None:
    nothing = torch.ones(2, 1, dtype=torch.bool)
    made, spared = Masked(looks_at_values, own_mask=True), Masked(looks_at_values)

    assert peak_bytes(made, nothing) > peak_bytes(spared, nothing)
