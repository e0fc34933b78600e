from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchfinder.errors import DeviceError, UsageError
from batchfinder.probing.devices.choose_device import accelerator, choose_device
from batchfinder.probing.devices.cuda import CudaDevice
from batchfinder.probing.devices.device import DeviceMemory, budget
from batchfinder.probing.options import ProbeOptions
from batchfinder.units import GIB

has_cuda = torch.cuda.is_available()
sizes = st.integers(0, 10**12)


def memory(
    capacity: int = 24 * GIB, others: int = 0, context: int = 0, held: int = 0
) -> DeviceMemory:
    return DeviceMemory(capacity, others, context, held)


def test_the_cpu_by_name() -> None:
    device = choose_device("cpu")
    assert (device.name, device.torch_device) == ("cpu", torch.device("cpu"))
    assert device.limit_warning is None


@pytest.mark.skipif(accelerator() is not None, reason="there is an accelerator")
def test_without_an_accelerator_it_is_the_cpu() -> None:
    assert choose_device(None, nn.Linear(1, 1)).name == "cpu"


@pytest.mark.skipif(accelerator() is not None, reason="there is an accelerator")
def test_a_cpu_build_beside_a_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchfinder.probing.devices.choose_device._GPU_FILES", (tmp_path,))
    monkeypatch.setattr(torch.version, "cuda", None)
    warning = choose_device(None).limit_warning
    assert warning is not None
    assert "this PyTorch is a CPU build. Try the CUDA build" in warning
    assert choose_device("cpu").limit_warning is None
    with pytest.raises(DeviceError, match="Try the CUDA build"):
        choose_device("cuda")


@pytest.mark.parametrize("asked", ["gpu", "cuda:x", "", "cpu0"])
def test_a_device_that_does_not_exist(asked: str) -> None:
    with pytest.raises(UsageError, match=f"there is no device {asked!r}. Try cpu, cuda"):
        choose_device(asked)


def test_the_meta_device_runs_nothing() -> None:
    with pytest.raises(UsageError, match=r"nothing runs on the meta device\. Try cpu"):
        choose_device("meta")


@pytest.mark.skipif(has_cuda, reason="there is CUDA")
@pytest.mark.parametrize("asked", ["cuda", "cuda:3"])
def test_cuda_where_there_is_none(asked: str) -> None:
    with pytest.raises(DeviceError, match=r"there is no CUDA device here.* Try .*--device cpu"):
        choose_device(asked)


@pytest.mark.skipif(accelerator() is not None, reason="there is an accelerator")
@pytest.mark.parametrize("asked", ["mps", "xpu"])
def test_an_accelerator_that_is_not_here(asked: str) -> None:
    with pytest.raises(DeviceError, match=f"{asked} is not available on this machine. Try cpu"):
        choose_device(asked)


def test_the_budget_is_the_free_memory_without_the_headroom() -> None:
    assert budget(memory(100, others=20, context=10), None, 0.1) == 63


def test_a_limit_counts_the_context_but_not_what_others_hold() -> None:
    assert budget(memory(100, others=20, context=10), 50, 0.1) == 36


def test_a_limit_above_what_is_free_gives_what_is_free() -> None:
    assert budget(memory(100, others=60), 50, 0.0) == 40


@given(sizes, sizes, sizes, sizes, st.integers(1, 10**12), st.floats(0, 0.99))
def test_a_budget_never_exceeds_the_limit_or_the_free_memory(
    capacity: int, others: int, context: int, held: int, limit: int, headroom: float
) -> None:
    try:
        found = budget(memory(capacity, others, context, held), limit, headroom)
    except DeviceError:
        return
    assert held < found <= min(limit, capacity - others) - context


def test_a_limit_above_the_device() -> None:
    with pytest.raises(DeviceError) as error:
        budget(memory(24 * GIB), 25 * GIB, 0.05)
    assert str(error.value) == (
        "the memory limit of 25.0 GiB is above what the device has, 24.0 GiB. "
        "Try without a limit to use all of that"
    )


def test_a_limit_below_what_is_in_use() -> None:
    with pytest.raises(DeviceError) as error:
        budget(memory(24 * GIB, held=GIB), GIB, 0.05)
    assert str(error.value) == (
        "the memory limit of 1.0 GiB less 5% headroom is below what this process already uses, "
        "1.0 GiB. Try more than 1.1 GiB"
    )


def test_a_limit_that_ranks_share_is_named_as_the_user_gave_it() -> None:
    with pytest.raises(DeviceError) as error:
        budget(replace(memory(12 * GIB, held=GIB), ranks=2), GIB, 0.05)
    assert str(error.value) == (
        "the memory limit of 1.0 GiB for each of 2 ranks less 5% headroom is below what this "
        "process already uses, 1.0 GiB. Try more than 2.1 GiB"
    )


def test_a_device_that_others_have_filled() -> None:
    with pytest.raises(DeviceError, match="Try ending other processes that use it"):
        budget(memory(24 * GIB, others=24 * GIB), None, 0.05)


@pytest.mark.parametrize("headroom", [-0.1, 1.0, float("nan")])
def test_a_headroom_that_is_no_fraction(headroom: float) -> None:
    with pytest.raises(UsageError, match="headroom is a fraction of the memory from 0 to below 1"):
        ProbeOptions(headroom=headroom)


def test_a_foreign_allocator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Fake GPU")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    with pytest.raises(DeviceError, match="cuda:0 Fake GPU has a pluggable allocator"):
        CudaDevice(torch.device("cuda", 0))
