"""Results of estimates. Frozen; ``reporting`` renders them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from batchfinder.results.record import Summarized
from batchfinder.results.result import BatchSizeResult
from batchfinder.simulation.explanation import Explanation
from batchfinder.simulation.gpus import Gpu
from batchfinder.simulation.tracing.data_parallel import Cluster
from batchfinder.units import format_bytes


@dataclass(frozen=True, repr=False)
class Estimate(Summarized):
    """The largest batch size on a simulated GPU, and what its memory is used for.

    ``int(estimate)`` is the batch size, ``str(estimate)`` a one-line summary.

    Attributes:
        gpu: the simulated GPU.
        low: the largest size that fits if the step needs more memory than simulated, within reason.
        high: the largest size that fits if the step needs less memory than simulated, within
            reason.
        result: the search, as from ``find_max_batch``, with simulated probes.
        explanation: the terms of the peak at the answer, or at the smallest size if nothing fits.
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
        """Peak memory of the whole process on the device."""
        return sum(self.explanation.terms.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the result's plain data, plus ``gpu``, ``interval``, the peak and its terms."""
        return {
            **self.result.to_dict(),
            "gpu": dataclasses.asdict(self.gpu),
            "interval": [self.low, self.high],
            "peak_bytes": self.peak_bytes,
            "explanation": self.explanation.to_dict(),
        }


@dataclass(frozen=True, repr=False)
class PeakEstimate(Summarized):
    """The peak memory of a training step at one batch size.

    Attributes:
        gpu: the simulated GPU.
        batch_size: examples per forward/backward pass.
        fits: True if the step fits into the GPU's memory minus the headroom, without flushing the
            allocator's cache in every step.
        peak_allocated_bytes: most bytes that tensors hold.
        peak_reserved_bytes: most bytes that the caching allocator holds.
        budget_bytes: most bytes that the caching allocator may hold.
        explanation: the terms of the peak.
        warnings: problems with the step that the user should act on.
    """

    gpu: Gpu
    batch_size: int
    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    budget_bytes: int
    explanation: Explanation
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        peak = format_bytes(self.peak_bytes)
        return f"batch size {self.batch_size} {verdict} on {self.gpu.name}, peak {peak}"

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the whole process on the device."""
        return self.peak_reserved_bytes + self.gpu.overhead_bytes


@dataclass(frozen=True, repr=False)
class ClusterEstimate(Summarized):
    """The estimate for one rank of a job."""

    cluster: Cluster
    estimate: Estimate

    def __str__(self) -> str:
        return f"{self.estimate}, {self.cluster.world_size} ranks"

    @property
    def global_batch_size(self) -> int:
        """Examples per forward/backward pass over all ranks."""
        return self.estimate.batch_size * self.cluster.world_size

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate's plain data, plus the facts of the job."""
        return {
            **self.estimate.to_dict(),
            **dataclasses.asdict(self.cluster),
            "global_batch_size": self.global_batch_size,
        }
