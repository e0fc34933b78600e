"""A CUDA (or ROCm) device: the caching allocator's own limit and its own statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from batchfinder.probing.device import DeviceMemory, Peaks

# The context, loaded kernels and library handles of one process, outside the allocator: about
# 0.3 to 0.5 GB since CUDA 11.7 loads kernels lazily. No call tells it apart from what other
# processes hold.
CONTEXT_BYTES = 512 * 1024**2


class CudaDevice:
    """See :class:`~batchfinder.probing.device.Device`.

    Args:
        torch_device: of type ``cuda``; without an index the current device.
    """

    limit_warning: str | None = None
    leaves_no_trace = True

    def __init__(self, torch_device: torch.device) -> None:
        index = torch_device.index
        self._index = torch.cuda.current_device() if index is None else index
        self.torch_device = torch.device("cuda", self._index)
        self.name = f"cuda:{self._index} {torch.cuda.get_device_name(self._index)}"

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self._index)
        reserved = torch.cuda.memory_reserved(self._index)
        elsewhere = max(0, total - free - reserved)
        context = min(elsewhere, CONTEXT_BYTES)
        return DeviceMemory(total, elsewhere - context, context, self.held_bytes())

    @contextlib.contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        total = torch.cuda.get_device_properties(self._index).total_memory
        # Newer than the oldest PyTorch supported; before it, nobody could ask either.
        read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        before = read(self._index) if read is not None else 1.0
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), self._index)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self._index)

    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._index)

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)

    def peaks(self) -> Peaks:
        torch.cuda.synchronize(self._index)
        return Peaks(
            torch.cuda.max_memory_allocated(self._index),
            torch.cuda.max_memory_reserved(self._index),
        )

    def allocation_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._index).get("num_alloc_retries", 0))

    def release_cache(self) -> None:
        torch.cuda.empty_cache()
