"""A simulation with a tensor whose value is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from batchfinder.simulation.tracing.fake import fake_cuda
from batchfinder.simulation.tracing.tracker import StorageTracker
from batchfinder.simulation.values.known import know

IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


@contextmanager
def without_data() -> Iterator[Tensor]:
    """Start a simulation and yield a fake tensor with the known value IDS."""
    with fake_cuda((8, 0)), StorageTracker(1, nn.Identity()):
        ids = torch.empty(8, dtype=torch.int64)
        know(ids, IDS)
        yield ids
