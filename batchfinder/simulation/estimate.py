"""What an estimate tells. Frozen; rendered elsewhere."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from batchfinder.results.result import BatchSizeResult
from batchfinder.simulation.explanation import Explanation
from batchfinder.simulation.gpus import Gpu
from batchfinder.simulation.tracing.cluster import Cluster
from batchfinder.units import format_bytes


@dataclass(frozen=True)
class Estimate:
    """The largest batch size on a simulated GPU, and what its memory goes to.

    ``int(estimate)`` is the batch size, ``str(estimate)`` one line with it.

    Attributes:
        gpu: the GPU.
        low: the batch size that fits even if the step needs as much more as is plausible.
        high: the largest size that fits if it needs less than simulated.
        result: the search, as from ``find_max_batch``; its probes are simulated.
        explanation: the peak at the answer, taken apart; at the smallest size if nothing fits.
    """

    gpu: Gpu
    low: int
    high: int
    result: BatchSizeResult
    explanation: Explanation

    def __int__(self) -> int:
        return self.batch_size

    def __str__(self) -> str:
        size = f"batch size {self.batch_size} ({self.low} to {self.high} are plausible)"
        return f"{size} on {self.gpu.name}, peak {format_bytes(self.peak_bytes)}"

    @property
    def batch_size(self) -> int:
        """The largest batch size that fits; 0 if none does."""
        return self.result.batch_size

    @property
    def peak_bytes(self) -> int:
        """What the whole process takes of the device at its peak."""
        return sum(self.explanation.terms.values())

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain data: raw bytes, with the ``schema_version`` of the result."""
        return {
            **self.result.to_dict(),
            "gpu": {**dataclasses.asdict(self.gpu)},
            "interval": [self.low, self.high],
            "peak_bytes": self.peak_bytes,
            "explanation": self.explanation.to_dict(),
        }


@dataclass(frozen=True)
class PeakEstimate:
    """The peak memory of a training step at one batch size.

    Attributes:
        gpu: the GPU whose kernels were imitated.
        batch_size: examples per forward/backward pass.
        fits: whether the step runs within the GPU's memory less the headroom, without flushing the
            allocator's cache in every step.
        peak_allocated_bytes: held by tensors.
        peak_reserved_bytes: held by the caching allocator.
        explanation: the peak, taken apart.
        warnings: what the user should know of the step.
    """

    gpu: Gpu
    batch_size: int
    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    explanation: Explanation
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        peak = format_bytes(self.peak_bytes)
        return f"batch size {self.batch_size} {verdict} on {self.gpu.name}, peak {peak}"

    @property
    def peak_bytes(self) -> int:
        """What the whole process takes of the device at its peak."""
        return self.peak_reserved_bytes + self.gpu.overhead_bytes


@dataclass(frozen=True)
class ClusterEstimate:
    """The estimate for one rank of a job.

    Attributes:
        cluster: how many ranks there are, and what they share.
        estimate: of one of them.
    """

    cluster: Cluster
    estimate: Estimate

    @property
    def global_batch_size(self) -> int:
        """Examples per forward/backward pass over all ranks."""
        return self.estimate.batch_size * self.cluster.world_size

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain data, with the job's own facts."""
        return {
            **self.estimate.to_dict(),
            **dataclasses.asdict(self.cluster),
            "global_batch_size": self.global_batch_size,
        }
