"""Accelerators that are not here, by modules that answer as theirs do."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from batchfinder.errors import DeviceError
from batchfinder.probing.devices.device import Peaks
from batchfinder.probing.devices.other import OtherAccelerator
from batchfinder.units import GIB

SECOND = torch.device("xpu", 1)


@dataclass
class Xpu:
    """Two devices; every function asks which one is meant."""

    fractions: dict[int, float] = field(default_factory=lambda: {0: 1.0, 1: 0.75})

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return (4 * GIB, 8 * GIB) if device == SECOND else (0, 2 * GIB)

    def memory_allocated(self, device: torch.device) -> int:
        return GIB if device == SECOND else 0

    def max_memory_allocated(self, device: torch.device) -> int:
        return 2 * GIB if device == SECOND else 0

    def max_memory_reserved(self, device: torch.device) -> int:
        return 3 * GIB if device == SECOND else 0

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.fractions[device.index]

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self.fractions[device.index] = fraction

    def synchronize(self, device: torch.device) -> None: ...


@dataclass
class Mps:
    """One device, and functions that take none."""

    fractions: list[float] = field(default_factory=list)

    def recommended_max_memory(self) -> int:
        return 8 * GIB

    def current_allocated_memory(self) -> int:
        return GIB

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.fractions.append(fraction)


def test_it_is_the_device_asked_for_that_is_read_and_limited() -> None:
    xpu = Xpu()
    device = OtherAccelerator(SECOND, xpu)
    memory = device.memory()
    assert (memory.capacity_bytes, memory.held_bytes) == (8 * GIB, GIB)
    assert memory.used_by_others_bytes == 3 * GIB
    with device.limited_to(2 * GIB):
        assert xpu.fractions == {0: 1.0, 1: 0.25}
        assert device.peaks() == Peaks(2 * GIB, 3 * GIB)
    assert xpu.fractions == {0: 1.0, 1: 0.75}


@pytest.mark.parametrize(("variable", "before"), [(None, 1.7), ("0.9", 0.9)])
def test_on_a_mac_the_limit_that_there_was_comes_back(
    variable: str | None, before: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", raising=False)
    if variable:
        monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", variable)
    mps = Mps()
    with OtherAccelerator(torch.device("mps"), mps).limited_to(2 * GIB):
        assert mps.fractions == [0.25]
    assert mps.fractions == [0.25, before]


def test_where_nothing_can_be_limited_that_is_said() -> None:
    @dataclass
    class Unlimited:
        def recommended_max_memory(self) -> int:
            return 8 * GIB

    device = OtherAccelerator(torch.device("mps"), Unlimited())
    with device.limited_to(GIB):
        pass
    assert "PyTorch cannot limit the memory of mps" in (device.limit_warning or "")


def test_a_device_that_tells_nothing_is_refused() -> None:
    with pytest.raises(DeviceError, match="does not tell how much memory mps has"):
        OtherAccelerator(torch.device("mps"), object())
