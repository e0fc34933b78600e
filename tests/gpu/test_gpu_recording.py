"""Recordings of requests to PyTorch's own CUDA allocator."""

from __future__ import annotations

from typing import Any

import torch
from gpu.models import DEVICE, needs_cuda

from batchfinder.probing.recording import recording
from batchfinder.search.prober import Recording
from batchfinder.units import MIB

pytestmark = needs_cuda


def test_blocks_are_recorded_with_their_streams() -> None:
    """Batches come on a stream of their own, as from timm's loader."""
    make_stream: Any = torch.cuda.Stream
    side = make_stream(DEVICE)
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
    side_number = recorded.streams[recorded.held.index(held.nbytes)]
    batches, outputs = (recorded.streams[len(recorded.held) + first :: 2] for first in (0, 1))
    assert {*batches} == {side_number}
    assert side_number not in outputs
    assert len({*outputs}) == 1
