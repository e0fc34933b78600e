"""A CUDA (or ROCm) device: the caching allocator's own limit and its own statistics."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import torch

from batchfinder.errors import DeviceError
from batchfinder.probing.devices.cpu import host_memory
from batchfinder.probing.devices.device import Device, DeviceMemory, Peaks
from batchfinder.units import MIB

# The context, loaded kernels and library handles of one process on a GPU, outside the allocator:
# about 0.3 to 0.5 GB since CUDA 11.7, which loads kernels lazily. No function separates this from
# the memory of other processes.
CONTEXT_BYTES = 512 * MIB

# batchfinder.simulation.kernels.matrix_products says which GPUs use 32 MiB.
_USUAL_BYTES = {32 * MIB, 8_519_680}
_NO_POOL = (0, 0)


class CudaDevice(Device):
    """See :class:`~batchfinder.probing.devices.device.Device`.

    Args:
        torch_device: a device of type ``cuda``; without an index, the current one.

    Raises:
        DeviceError: the allocator is not PyTorch's own, such as RMM's.
    """

    def __init__(self, torch_device: torch.device) -> None:
        index = torch_device.index
        self._index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", self._index)
        self.name = f"cuda:{self._index} {torch.cuda.get_device_name(self._index)}"
        if (backend := torch.cuda.get_allocator_backend()) not in ("native", "cudaMallocAsync"):
            raise DeviceError(
                f"{self.name} has a {backend} allocator, whose memory PyTorch cannot limit or "
                "read. Try the search without it"
            )
        self._workspaces = CublasWorkspaces()

    def memory(self) -> DeviceMemory:
        try:
            free, total = self._free_and_total()
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

    def _free_and_total(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._index)
        properties = torch.cuda.get_device_properties(self._index)
        if properties.is_integrated and not torch.version.hip:
            free = with_page_cache(free, total, host_memory()[1])
        return free, total

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
        free, total = self._free_and_total()
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


def with_page_cache(free: int, total: int, available: int) -> int:
    """Return the free bytes of a GPU that shares the host's memory, as in a DGX Spark or Jetson.

    CUDA reports files in the host's cache as used there
    (https://github.com/vllm-project/vllm/issues/48140).

    Args:
        free: the free bytes as CUDA reports them.
        total: the bytes of the GPU.
        available: the available bytes of the host.

    Example:
        >>> with_page_cache(free=10, total=120, available=90)
        90
    """
    return max(free, min(total, available))


class CublasWorkspaces:
    """The workspaces that cuBLAS keeps in the allocator's memory, from when this object was made.

    PyTorch keeps one for each thread that multiplies matrices, and the backward pass runs in a
    thread of its own. The place of a workspace decides how much else fits. In a fresh process, the
    backward pass puts its workspace into a hole that the first step's activations left. A step that
    finds the workspace of an earlier probe proves nothing about a fresh process.

    Earlier workspaces stay: another part of the program may be using them.
    """

    def __init__(self) -> None:
        sizes = _sizes()
        # Other allocators do not list their blocks.
        is_native = torch.cuda.get_allocator_backend() == "native"
        self._are_ours = (
            is_native
            and sizes is not None
            and not any(
                block["state"] == "active_allocated" and block["requested_size"] in sizes
                for segment in _segments()
                for block in segment["blocks"]
            )
        )

    def release(self) -> None:
        """Return the workspaces to the allocator.

        Keep them if there are CUDA graphs, which may have recorded their addresses.
        """
        if self._are_ours and all(s.get("segment_pool_id") == _NO_POOL for s in _segments()):
            torch._C._cuda_clearCublasWorkspaces()


def _segments() -> list[dict[str, Any]]:
    """Return what the allocator holds, on all devices."""
    return torch.cuda.memory_snapshot()  # type: ignore[no-any-return, no-untyped-call]


def _sizes() -> set[int] | None:
    """Return the possible sizes of a workspace in bytes; None if unknown."""
    read = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    if read is not None:  # PyTorch 2.12
        return {*_USUAL_BYTES, read()}
    return None if "CUBLAS_WORKSPACE_CONFIG" in os.environ else _USUAL_BYTES
