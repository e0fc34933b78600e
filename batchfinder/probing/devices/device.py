"""The protocol of devices: their memory, a limit on it, its peaks, and clean-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from batchfinder.errors import DeviceError
from batchfinder.units import format_bytes


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device, and how much of it is in use.

    Attributes:
        capacity_bytes: the total.
        used_by_others_bytes: used by other processes.
        context_bytes: used by this process outside the allocator: the CUDA context and kernels.
        held_bytes: used by this process in the allocator before the search.
        ranks: the number of processes of one job that share it; the rest is the share of one.
    """

    capacity_bytes: int
    used_by_others_bytes: int
    context_bytes: int
    held_bytes: int
    ranks: int = 1


@dataclass(frozen=True)
class Peaks:
    """The highest memory use since the last reset.

    Attributes:
        allocated_bytes: held by tensors.
        reserved_bytes: held by the caching allocator.
        outside_bytes: in use outside that allocator now: the CUDA context, kernels and libraries,
            and other processes; 0 if unknown.
    """

    allocated_bytes: int
    reserved_bytes: int
    outside_bytes: int = 0


class Device(Protocol):
    """A device, as a search uses it. Its kinds derive from this class.

    Attributes:
        torch_device: the device as PyTorch names it.
        name: the name shown to people, such as ``"cuda:0 NVIDIA H200"``.
        limit_warning: a warning that the budget cannot be enforced; None where it is.
        leaves_no_trace: True if a process is as good as new after a probe, whatever its outcome. If
            False, the first step of a process also reads too low.
    """

    torch_device: torch.device
    name: str
    limit_warning: str | None = None
    leaves_no_trace: bool = True

    def memory(self) -> DeviceMemory:
        """Read the memory of the device."""
        ...

    def allowed_share(self) -> float:
        """Return the fraction of the memory that the user lets this process use; 1 for all."""
        return 1.0

    def limited_to(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Let the allocator run out of memory at the budget while the block runs.

        Only an allocation may fail: the session also cleans up in this block.
        """
        ...

    def held_bytes(self) -> int:
        """Return what this process holds now, in the bytes that the budget counts."""
        ...

    def kept_bytes(self) -> int:
        """Return what the allocator still keeps after its cache was released: holes too."""
        return self.held_bytes()

    def in_use_bytes(self) -> int:
        """Return what tensors hold now, without the allocator's cache; 0 if unknown."""
        return self.held_bytes()

    def reset_peaks(self) -> None:
        """Let the next peaks start from what is held now."""
        ...

    def peaks(self) -> Peaks:
        """Wait until the device has finished, and return the peaks since the last reset."""
        ...

    def allocation_retries(self) -> int:
        """Return how often the allocator has flushed its cache to find room, ever."""
        return 0

    def release_cache(self) -> None:
        """Return cached memory to the device. Collect garbage before."""
        ...

    def shapes_warning(self, in_use_bytes: Sequence[int]) -> str:
        """Return the warning if memory stays in use for each new shape of a batch; else "".

        Args:
            in_use_bytes: in use after each step of a confirmation with batches that vary.
        """
        return ""


def budget(memory: DeviceMemory, memory_limit: int | None, headroom: float) -> int:
    """Return the budget: ``(min(limit, capacity - others) - context) * (1 - headroom)``.

    Raises:
        DeviceError: the limit is above the capacity, or below what this process uses already.

    Example:
        >>> GiB = 2**30
        >>> h200 = DeviceMemory(140 * GiB, 1 * GiB, GiB // 2, 0)
        >>> budget(h200, memory_limit=24 * GiB, headroom=0.5) / GiB
        11.75
    """
    capacity = memory.capacity_bytes
    if memory_limit is not None and memory_limit > capacity:
        raise DeviceError(
            f"the memory limit of {format_bytes(memory_limit)} is above what the device has, "
            f"{format_bytes(capacity)}. Try without a limit to use all of that"
        )
    usable = min(memory_limit or capacity, capacity - memory.used_by_others_bytes)
    budget_bytes = math.floor((usable - memory.context_bytes) * (1 - headroom))
    in_use = memory.held_bytes + memory.context_bytes
    if budget_bytes <= memory.held_bytes:
        share = f" for each of {memory.ranks} ranks" if memory.ranks > 1 else ""
        raise DeviceError(
            f"the memory limit of {format_bytes(usable)}{share} less {headroom:.0%} headroom is "
            f"below what this process already uses, {format_bytes(in_use)}. Try more than "
            f"{format_bytes(in_use / (1 - headroom) * memory.ranks)}"
            if memory_limit == usable
            else f"only {format_bytes(usable)} is free on the device and this process already "
            f"uses {format_bytes(in_use)}. Try ending other processes that use it"
        )
    return budget_bytes
