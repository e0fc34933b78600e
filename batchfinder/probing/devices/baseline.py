"""Whether a process is as good as before any large probe."""

from __future__ import annotations

from dataclasses import dataclass

from batchfinder.probing.devices.device import Device
from batchfinder.probing.steadiness import GROWTH_NOISE
from batchfinder.units import MIB

# A process that holds more than this share beyond its baseline, and more than the noise of the
# readings (workspaces of a library, say), is not fit for another verdict.
BASELINE_WITHIN = 0.02

# Of what the allocator keeps, so much more may be holes: CUDA's takes tensors of 1 to 10 MiB from
# blocks of 20 MiB, and keeps such a block as long as one of them lives
# (kMinLargeAlloc and kLargeBuffer in PyTorch's c10/core/AllocatorConfig.h).
HOLES_BYTES = 64 * MIB


@dataclass(frozen=True)
class Baseline:
    """What a process holds, and what its allocator keeps, before any large probe.

    Attributes:
        held_bytes: by tensors that stay, of the budget.
        kept_bytes: by the allocator, with its cache released.
        noise_bytes: growth below this makes no difference to the budget.
    """

    held_bytes: int
    kept_bytes: int
    noise_bytes: float

    @classmethod
    def of(cls, device: Device, budget_bytes: int) -> Baseline:
        """As it is now."""
        return cls(device.held_bytes(), device.kept_bytes(), GROWTH_NOISE * budget_bytes)

    def is_kept_by(self, device: Device) -> bool:
        """Whether the process holds no more by now. Release the cache before."""
        allowed = max(BASELINE_WITHIN * self.held_bytes, self.noise_bytes)
        return (
            device.held_bytes() <= self.held_bytes + allowed
            and device.kept_bytes() <= self.kept_bytes + allowed + HOLES_BYTES
        )
