"""Estimates for a rank of data-parallel jobs of several sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from batchfinder.estimator import estimate_on_gpus
from batchfinder.probing.devices.allocator.caching import AllocatorSettings
from batchfinder.probing.options import ProbeOptions
from batchfinder.search.bounds import Bounds
from batchfinder.simulation.estimate import ClusterEstimate
from batchfinder.simulation.gpus import Gpu
from batchfinder.simulation.tracing.data_parallel import Cluster
from batchfinder.training.setup import TrainingSetup


def estimate_on_cluster(
    setup: TrainingSetup,
    gpus: Sequence[Gpu],
    options: ProbeOptions,
    settings: AllocatorSettings,
    bounds: Bounds,
    largest: Cluster,
) -> list[ClusterEstimate]:
    """Estimate jobs of 1, 2, 4, ... ranks, up to the largest; one rank of each is simulated.

    All ranks of a job use the same kind of GPU. Returns, for each GPU in the given order, the jobs
    from small to large.
    """
    by_gpu: list[list[ClusterEstimate]] = [[] for _ in gpus]
    for world_size in _doublings(largest.world_size):
        cluster = dataclasses.replace(largest, world_size=world_size)
        estimates = estimate_on_gpus(setup, gpus, options, settings, bounds, cluster=cluster)
        for row, estimate in zip(by_gpu, estimates, strict=True):
            row.append(ClusterEstimate(cluster, estimate))
    return [estimate for row in by_gpu for estimate in row]


def _doublings(largest: int) -> list[int]:
    """Return 1, 2, 4, ... and the largest itself."""
    powers = (2**exponent for exponent in range(largest.bit_length()))
    return [*(power for power in powers if power < largest), largest]
