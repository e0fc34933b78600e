"""The memory of a process before any large probe, to compare with after it."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.probing.devices.device import Device
from batchfinder.probing.steadiness import GROWTH_NOISE
from batchfinder.units import MIB

# A process that holds this fraction more than its baseline, and more than the noise of the
# readings (such as a library's workspaces), must not try another size.
BASELINE_WITHIN = 0.02

# The allocator may keep this much more as holes. CUDA's takes tensors of 1 to 10 MiB from blocks of
# 20 MiB, and keeps a block while one of its tensors lives (kMinLargeAlloc and kLargeBuffer in
# PyTorch's c10/core/AllocatorConfig.h).
HOLES_BYTES = 64 * MIB


@dataclass(frozen=True)
class Baseline:
    """What a process holds, and what its allocator keeps, before any large probe.

    Attributes:
        held_bytes: held by tensors that stay, in the bytes that the budget counts.
        kept_bytes: kept by the allocator after its cache was released.
        noise_bytes: growth below this makes no difference to the budget.
    """

    held_bytes: int
    kept_bytes: int
    noise_bytes: float

    @classmethod
    def of(cls, device: Device, budget_bytes: int) -> Baseline:
        """Read the baseline now."""
        return cls(device.held_bytes(), device.kept_bytes(), GROWTH_NOISE * budget_bytes)

    def is_kept_by(self, device: Device) -> bool:
        """Return True if the process holds no more now. Release the cache before."""
        allowed = max(BASELINE_WITHIN * self.held_bytes, self.noise_bytes)
        return (
            device.held_bytes() <= self.held_bytes + allowed
            and device.kept_bytes() <= self.kept_bytes + allowed + HOLES_BYTES
        )
