"""A CUDA (or ROCm) device: the caching allocator's own limit and its own statistics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from batchfinder.errors import DeviceError
from batchfinder.probing.devices.cublas_workspaces import CublasWorkspaces
from batchfinder.probing.devices.device import Device, DeviceMemory, Peaks

# The context, loaded kernels and library handles of one process, outside the allocator: about
# 0.3 to 0.5 GB since CUDA 11.7, which loads kernels lazily. No function separates this from the
# memory of other processes.
CONTEXT_BYTES = 512 * 1024**2


class CudaDevice(Device):
    """See :class:`~batchfinder.probing.devices.device.Device`.

    Args:
        torch_device: a device of type ``cuda``; without an index, the current one.
    """

    def __init__(self, torch_device: torch.device) -> None:
        index = torch_device.index
        self._index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", self._index)
        self.name = f"cuda:{self._index} {torch.cuda.get_device_name(self._index)}"
        self._workspaces = CublasWorkspaces()

    def memory(self) -> DeviceMemory:
        try:
            free, total = torch.cuda.mem_get_info(self._index)
        except RuntimeError as error:  # no room for a context, or another process owns the device
            reason = str(error).partition("\n")[0]
            raise DeviceError(
                f"{self.name} cannot be used ({reason}). Try nvidia-smi to see which "
                "processes use it, or another device"
            ) from None
        reserved = torch.cuda.memory_reserved(self._index)
        elsewhere = max(0, total - free - reserved)
        context = min(elsewhere, CONTEXT_BYTES)
        # Memory beyond a limit that the user set counts as used.
        withheld = total - math.floor(self.allowed_share() * total)
        return DeviceMemory(total, max(elsewhere, withheld) - context, context, self.held_bytes())

    def allowed_share(self) -> float:
        # Older versions of PyTorch do not have this function.
        read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        # The cudaMallocAsync backend starts without a limit, and reports one far above 1.
        with torch.cuda.device(self._index):
            return 1.0 if read is None else min(1.0, float(read(self._index)))

    @contextlib.contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        total = torch.cuda.get_device_properties(self._index).total_memory
        # Kernels of Triton and others run on the current device. Some versions of PyTorch change
        # it to the device whose limit was set or read last.
        with torch.cuda.device(self._index):
            before = self.allowed_share()
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), self._index)
            try:
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(before, self._index)

    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._index)

    def kept_bytes(self) -> int:
        # This includes the pools of CUDA graphs, which count as allocated only while a graph runs.
        return torch.cuda.memory_reserved(self._index)

    def in_use_bytes(self) -> int:
        # The allocator rounds by up to 1 MiB, differently in each step, which looks like a leak.
        statistics = torch.cuda.memory_stats(self._index)
        return int(statistics.get("requested_bytes.all.current") or self.held_bytes())

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)

    def peaks(self) -> Peaks:
        torch.cuda.synchronize(self._index)
        free, total = torch.cuda.mem_get_info(self._index)
        return Peaks(
            torch.cuda.max_memory_allocated(self._index),
            torch.cuda.max_memory_reserved(self._index),
            max(0, total - free - torch.cuda.memory_reserved(self._index)),
        )

    def allocation_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._index).get("num_alloc_retries", 0))

    def release_cache(self) -> None:
        self._workspaces.release()
        torch.cuda.empty_cache()
