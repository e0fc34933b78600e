"""What a device must tell and do for a search: its memory, a limit on it, peaks, and clean-up."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from batchfinder.errors import DeviceError, UsageError
from batchfinder.units import format_bytes


@dataclass(frozen=True)
class DeviceMemory:
    """What a device has, and what of it is spoken for.

    Attributes:
        capacity_bytes: all of it.
        used_by_others_bytes: held by other processes.
        context_bytes: ours, but outside the allocator: the CUDA context and loaded kernels.
        held_bytes: ours, in the allocator, before the search.
    """

    capacity_bytes: int
    used_by_others_bytes: int
    context_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class Peaks:
    """The most that was held at any moment since the last reset.

    Attributes:
        allocated_bytes: by tensors.
        reserved_bytes: by the allocator.
    """

    allocated_bytes: int
    reserved_bytes: int


class Device(Protocol):
    """A device, as far as a search is concerned."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str:
        """For people, such as ``"cuda:0 NVIDIA H200"``."""
        ...

    @property
    def limit_warning(self) -> str | None:
        """What is to be said where the budget cannot be enforced; None where it is."""
        ...

    @property
    def leaves_no_trace(self) -> bool:
        """Whether a process is as good as new after a probe, whatever its outcome.

        Where it is not, the first step of a process also shows too little.
        """
        ...

    def memory(self) -> DeviceMemory: ...

    def allowed_share(self) -> float:
        """How much of it this process may use; below 1 by the user's own setting only."""
        ...

    def limited_to(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Make the allocator itself run out at the budget; lifted on leaving."""
        ...

    def held_bytes(self) -> int:
        """What this process holds now, in the bytes that the budget counts."""
        ...

    def kept_bytes(self) -> int:
        """What the allocator keeps of the budget, with its cache released: holes among tensors."""
        ...

    def in_use_bytes(self) -> int:
        """What tensors take now, without what the allocator only keeps; 0 where nothing tells."""
        ...

    def reset_peaks(self) -> None: ...

    def peaks(self) -> Peaks:
        """Waits until the device has finished."""
        ...

    def allocation_retries(self) -> int:
        """How often, ever, the allocator had to flush its cache to find room."""
        ...

    def release_cache(self) -> None:
        """Give cached memory back, after garbage has been collected."""
        ...


def budget(memory: DeviceMemory, memory_limit: int | None, headroom: float) -> int:
    """What a search may use: ``(min(limit, capacity - others) - context) * (1 - headroom)``.

    Args:
        memory: of the device.
        memory_limit: in bytes, as if the device had no more; None: all that is free.
        headroom: the fraction kept free, from 0 to below 1.

    Returns:
        The budget in bytes.

    Raises:
        UsageError: the headroom is no such fraction.
        DeviceError: the limit is above the device's capacity, or below what is in use already.

    Example:
        >>> GiB = 2**30
        >>> h200 = DeviceMemory(140 * GiB, 1 * GiB, GiB // 2, 0)
        >>> budget(h200, memory_limit=24 * GiB, headroom=0.05) / GiB
        22.325
    """
    if not 0 <= headroom < 1:
        raise UsageError(f"headroom is a fraction of the memory from 0 to below 1, not {headroom}")
    capacity = memory.capacity_bytes
    if memory_limit is not None and memory_limit > capacity:
        raise DeviceError(
            f"the memory limit of {format_bytes(memory_limit)} is above what the device has, "
            f"{format_bytes(capacity)}; leave it out to use all of that"
        )
    usable = min(memory_limit or capacity, capacity - memory.used_by_others_bytes)
    budget_bytes = math.floor((usable - memory.context_bytes) * (1 - headroom))
    in_use = memory.held_bytes + memory.context_bytes
    if budget_bytes <= memory.held_bytes:
        raise DeviceError(
            f"the memory limit of {format_bytes(usable)} less {headroom:.0%} headroom is below "
            f"what this process already uses, {format_bytes(in_use)}; raise the limit"
            if memory_limit == usable
            else f"only {format_bytes(usable)} is free on the device and this process already "
            f"uses {format_bytes(in_use)}; end other processes that use it"
        )
    return budget_bytes
