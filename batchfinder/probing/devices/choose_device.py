"""The choice of the device: from "cuda:0", or nothing, to a ``Device``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from batchfinder.errors import DeviceError, UsageError
from batchfinder.probing.devices.cpu import CpuDevice
from batchfinder.probing.devices.cuda import CudaDevice
from batchfinder.probing.devices.device import Device
from batchfinder.probing.devices.other import OtherAccelerator


def accelerator() -> torch.device | None:
    """Return the accelerator of this machine; None if there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    current = getattr(torch, "accelerator", None)  # PyTorch 2.6
    if current is not None and current.is_available():
        device = current.current_accelerator()
        return torch.device(device.type) if device is not None else None
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return None


def choose_device(asked: str | torch.device | None, model: nn.Module | None = None) -> Device:
    """Return the device to search on.

    Args:
        asked: the user's choice. Default: the model's device if that is an accelerator, else the
            accelerator of this machine, else the CPU.
        model: the model, for its device.

    Raises:
        UsageError: there is no such kind of device.
        DeviceError: this machine does not have the device.
    """
    if asked is not None:
        device = parse_device(asked)
    else:
        parameters = iter(()) if model is None else model.parameters()
        of_model = next((parameter.device for parameter in parameters), None)
        is_on_accelerator = of_model is not None and of_model.type not in ("cpu", "meta")
        device = of_model if of_model and is_on_accelerator else accelerator() or _CPU
    if device.type == "cpu":
        cpu = CpuDevice()
        if asked is None and _is_cpu_build() and _has_gpu():
            cpu.limit_warning = (
                "this search ran on the CPU. The machine has a GPU, but this PyTorch is a CPU "
                f"build. {_INSTALL}, or --device cpu to silence this warning"
            )
        return cpu
    if device.type == "cuda":
        _check_cuda(device)
        return CudaDevice(device)
    _check_other(device)
    return OtherAccelerator(device)


_CPU = torch.device("cpu")

_INSTALL = "Try the CUDA build from https://pytorch.org/get-started/locally"

# Files that the drivers of NVIDIA and AMD create.
_GPU_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/kfd"))


def _is_cpu_build() -> bool:
    return not (torch.version.cuda or torch.version.hip)


def _has_gpu() -> bool:
    return any(path.exists() for path in _GPU_FILES)


def parse_device(asked: str | torch.device) -> torch.device:
    """Return the device that the user names.

    Raises:
        UsageError: there is no such kind of device.
    """
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise UsageError(
            f"there is no device {str(asked)!r}. Try cpu, cuda, cuda:0 or mps"
        ) from None
    if device.type == "cpu" and device.index:  # PyTorch ignores the index
        raise UsageError(f"there is no {device} here. Try cpu, which is all of its cores")
    if device.type == "meta":
        raise UsageError("nothing runs on the meta device. Try cpu, cuda or another accelerator")
    return device


def _check_cuda(device: torch.device) -> None:
    if not torch.cuda.is_available():
        if _is_cpu_build():
            what = f"{_INSTALL}, or " if _has_gpu() else "Try "
            raise DeviceError(
                f"there is no CUDA device here: this PyTorch is a CPU build. {what}--device cpu"
            )
        raise DeviceError("there is no CUDA device here. Try nvidia-smi, or --device cpu")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise DeviceError(f"there is no {device} here. Try cuda:{count - 1}, the last one")


def _check_other(device: torch.device) -> None:
    found = accelerator()
    if found is None or found.type != device.type:
        raise DeviceError(
            f"{device} is not available on this machine. Try {found.type if found else 'cpu'}"
        )
