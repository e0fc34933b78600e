"""The estimate for each rank of a data-parallel job, over the sizes that the job may have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from batchfinder.estimator import estimate_on_gpus
from batchfinder.probing.options import ProbeOptions
from batchfinder.simulation.allocator.caching import AllocatorSettings
from batchfinder.simulation.estimate import ClusterEstimate
from batchfinder.simulation.gpus import Gpu, nccl_bytes
from batchfinder.simulation.tracing.cluster import Cluster
from batchfinder.training.setup import TrainingSetup


def estimate_on_cluster(
    setup: TrainingSetup,
    gpus: Sequence[Gpu],
    options: ProbeOptions,
    settings: AllocatorSettings,
    largest: Cluster,
    *,
    adds_nccl: bool = True,
    **bounds: Any,
) -> list[ClusterEstimate]:
    """The estimates for jobs of 1, 2, 4, ... ranks, up to the largest.

    One rank is simulated, whatever their number.

    Args:
        setup: what to train.
        gpus: at least one; each job is made of one kind.
        options: of the steps and the budget.
        settings: of the caching allocator.
        largest: the job with the most ranks.
        adds_nccl: whether the GPUs' overhead is without the buffers of NCCL.
        bounds: of the batch size; see ``estimate_on_gpus``.

    Returns:
        For each GPU, in the order given, the jobs from small to large.

    Raises:
        UsageError, SampleError, StepError, DeviceError, Exception: see ``estimate_on_gpus``.
    """
    by_gpu: list[list[ClusterEstimate]] = [[] for _ in gpus]
    for world_size in _doublings(largest.world_size):
        cluster = dataclasses.replace(largest, world_size=world_size)
        extra = nccl_bytes(world_size) if adds_nccl else 0
        members = [
            dataclasses.replace(gpu, overhead_bytes=gpu.overhead_bytes + extra) for gpu in gpus
        ]
        estimates = estimate_on_gpus(setup, members, options, settings, cluster=cluster, **bounds)
        for row, estimate in zip(by_gpu, estimates, strict=True):
            row.append(ClusterEstimate(cluster, estimate))
    return [estimate for row in by_gpu for estimate in row]


def _doublings(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest itself."""
    powers = (2**exponent for exponent in range(largest.bit_length()))
    return [*(power for power in powers if power < largest), largest]
