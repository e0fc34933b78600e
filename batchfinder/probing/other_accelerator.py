"""Accelerators other than CUDA (MPS, XPU, ...), as far as PyTorch gives access to their memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from batchfinder.errors import DeviceError
from batchfinder.probing.device import DeviceMemory, Peaks


class OtherAccelerator:
    """See :class:`~batchfinder.probing.device.Device`.

    Every function is looked up in the device's own module, ``torch.xpu`` or ``torch.mps``, under
    the names that those modules share with ``torch.cuda`` where they have them.

    Args:
        torch_device: of any accelerator type but ``cuda``.

    Raises:
        DeviceError: PyTorch tells nothing about the memory of this kind of device.
    """

    leaves_no_trace = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.name = str(torch_device)
        self._module: Any = torch.get_device_module(torch_device)
        self._total = self._total_memory()
        self._limit = self._function("set_per_process_memory_fraction")
        self.limit_warning = (
            None
            if self._limit
            else (
                f"PyTorch cannot limit the memory of {torch_device.type}: the search ends where "
                "the device itself runs out; close other programs that use it"
            )
        )

    def memory(self) -> DeviceMemory:
        held = self.held_bytes()
        information = self._function("mem_get_info")
        free = information()[0] if information else self._total - held
        return DeviceMemory(self._total, max(0, self._total - free - held), 0, held)

    @contextlib.contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        if self._limit is None:
            yield
            return
        self._limit(min(1.0, budget_bytes / self._total))
        try:
            yield
        finally:
            self._limit(1.0)

    def held_bytes(self) -> int:
        read = self._function("memory_allocated", "current_allocated_memory")
        return int(read()) if read else 0

    def in_use_bytes(self) -> int:
        return self.held_bytes()

    def reset_peaks(self) -> None:
        reset = self._function("reset_peak_memory_stats")
        if reset:
            reset()

    def peaks(self) -> Peaks:
        self._module.synchronize()
        # Without a high-water mark (MPS), what the driver holds at the end of the phase.
        held = self._function("driver_allocated_memory", "memory_reserved", "memory_allocated")
        allocated = self._function("max_memory_allocated") or held
        reserved = self._function("max_memory_reserved") or held
        return Peaks(int(allocated()) if allocated else 0, int(reserved()) if reserved else 0)

    def allocation_retries(self) -> int:
        return 0

    def release_cache(self) -> None:
        empty = self._function("empty_cache")
        if empty:
            empty()

    def _function(self, *names: str) -> Callable[..., Any] | None:
        return next((getattr(self._module, n) for n in names if hasattr(self._module, n)), None)

    def _total_memory(self) -> int:
        information = self._function("mem_get_info")
        if information:
            return int(information()[1])
        recommended = self._function("recommended_max_memory")
        if recommended:
            return int(recommended())
        raise DeviceError(
            f"PyTorch does not tell how much memory {self.torch_device} has; use another device"
        )
