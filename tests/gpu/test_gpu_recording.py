"""Recordings of requests to PyTorch's own CUDA allocator."""

from __future__ import annotations

import torch
from gpu.models import DEVICE, needs_cuda

from batchfinder.probing.recording import recording
from batchfinder.search.prober import Recording
from batchfinder.units import MIB

pytestmark = needs_cuda


def test_blocks_are_recorded_with_their_streams() -> None:
    """Batches come on a stream of their own, as from timm's loader."""
    side = torch.cuda.Stream(DEVICE)
    device = torch.empty(0, device=DEVICE).device
    with torch.cuda.stream(side):
        held = torch.empty(30 * MIB, dtype=torch.uint8, device=DEVICE)
    with recording(device) as recorder:
        for _ in range(2):
            with torch.cuda.stream(side):
                batch = torch.empty(100 * MIB, dtype=torch.uint8, device=DEVICE)
            del batch
            output = torch.empty(100 * MIB, dtype=torch.uint8, device=DEVICE)
            del output
            recorder.end_step()
        fields = recorder.recording()

    assert fields is not None
    recorded = Recording(**fields)
    assert recorded.held.index(held.nbytes) == len(recorded.held) - 1
    assert len({*recorded.streams[len(recorded.held) :: 2]}) == 1
    assert recorded.streams[-2] == recorded.streams[len(recorded.held) - 1] != recorded.streams[-1]
