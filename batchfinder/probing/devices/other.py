"""Accelerators other than CUDA (MPS, XPU, ...), as far as PyTorch shows their memory."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from batchfinder.errors import DeviceError
from batchfinder.probing.devices.device import Device, DeviceMemory, Peaks

# The fraction of its recommended memory that MPS may use by default
# (https://docs.pytorch.org/docs/stable/mps_environment_variables.html).
MPS_FRACTION = 1.7
MPS_FRACTION_VARIABLE = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"


class OtherAccelerator(Device):
    """See :class:`~batchfinder.probing.devices.device.Device`.

    Functions are looked up in the device's module, such as ``torch.xpu`` or ``torch.mps``, under
    the names that these modules share with ``torch.cuda``.

    Args:
        torch_device: a device of any accelerator type but ``cuda``.
        module: the module with its functions. Default: PyTorch's for this type.

    Raises:
        DeviceError: PyTorch shows nothing about the memory of this kind of device.
    """

    def __init__(self, torch_device: torch.device, module: Any = None) -> None:
        self.torch_device = torch_device
        self.name = str(torch_device)
        self._module: Any = module or torch.get_device_module(torch_device)
        # There is one MPS device, so its functions have no device argument.
        self._where = () if torch_device.type == "mps" else (torch_device,)
        self._total = self._total_memory()
        self._limit = self._function("set_per_process_memory_fraction")
        if not self._limit:
            self.limit_warning = (
                f"PyTorch cannot limit the memory of {torch_device.type}: the search ends where "
                "the device itself runs out. Try closing other programs that use it"
            )

    def memory(self) -> DeviceMemory:
        held = self.held_bytes()
        information = self._function("mem_get_info")
        free = information(*self._where)[0] if information else self._total - held
        withheld = self._total - math.floor(self.allowed_share() * self._total)
        return DeviceMemory(self._total, max(0, self._total - free - held, withheld), 0, held)

    def allowed_share(self) -> float:
        return min(1.0, self._fraction())

    @contextlib.contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        if self._limit is None:
            yield
            return
        before = self._fraction()
        self._limit(min(1.0, budget_bytes / self._total), *self._where)
        try:
            yield
        finally:
            self._limit(before, *self._where)

    def held_bytes(self) -> int:
        return self._read("memory_allocated", "current_allocated_memory")

    def reset_peaks(self) -> None:
        if reset := self._function("reset_peak_memory_stats"):
            reset(*self._where)

    def peaks(self) -> Peaks:
        self._module.synchronize(*self._where)
        # MPS has no high-water mark. Use what the driver holds at the end of the phase.
        held = "driver_allocated_memory", "memory_reserved", "memory_allocated"
        allocated = self._read("max_memory_allocated", *held)
        return Peaks(allocated, self._read("max_memory_reserved", *held))

    def release_cache(self) -> None:
        if empty := self._function("empty_cache"):
            empty()

    def _fraction(self) -> float:
        """Return the fraction of the memory that the process may use now."""
        if read := self._function("get_per_process_memory_fraction"):
            return float(read(*self._where))
        if self.torch_device.type == "mps":
            return float(os.environ.get(MPS_FRACTION_VARIABLE) or MPS_FRACTION)
        return 1.0

    def _read(self, *names: str) -> int:
        """Return the bytes that the first of some functions tells; 0 if there is none."""
        read = self._function(*names)
        return int(read(*self._where)) if read else 0

    def _function(self, *names: str) -> Callable[..., Any] | None:
        return next((getattr(self._module, n) for n in names if hasattr(self._module, n)), None)

    def _total_memory(self) -> int:
        if information := self._function("mem_get_info"):
            return int(information(*self._where)[1])
        if recommended := self._function("recommended_max_memory"):
            return int(recommended())
        raise DeviceError(
            f"PyTorch does not tell how much memory {self.torch_device} has. Try another device"
        )
