#!/usr/bin/env python3
"""How well the simulated GPU agrees with what real ones were asked for.

    python scripts/benchmarks/bench_recordings.py FOLDER [--published TABLE.csv]

FOLDER holds recordings of PyTorch's caching allocator. From the recorded start, each is replayed
through the simulated allocator, which must take a segment, of the same size, whenever the real one
did, and at no other request; and what the real one gave back must be free. Convolutions, and whole
training steps that can be rebuilt, are compared with the simulation. TABLE.csv has published peaks.
Writes scripts/results/recordings.json. Run it without the counting runtime, which has no cuDNN.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from parts.segmentation_models import build
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from batchfinder.probing.devices.allocator.blocks import (  # noqa: E402 - runs from a checkout too
    POOL_BYTES,
    SMALL_BYTES,
    Block,
    address_of,
    make_block,
    round_request,
    segment_bytes,
)
from batchfinder.probing.devices.allocator.caching import CachingAllocator  # noqa: E402
from batchfinder.simulation.gpus import Gpu, find_gpu  # noqa: E402
from batchfinder.simulation.kernels.convolution import (  # noqa: E402
    Convolution,
    Direction,
)
from batchfinder.simulation.kernels.workspaces import CudaWorkspaces  # noqa: E402
from batchfinder.simulation.trace.trace import EMPTY_CACHE, Kind, Trace  # noqa: E402
from batchfinder.simulation.tracing.fake import fake_copy, fake_cuda  # noqa: E402
from batchfinder.simulation.tracing.tracker import StorageTracker  # noqa: E402
from batchfinder.units import GIB, MIB  # noqa: E402

DIRECTIONS = {"fwd": Direction.OUTPUT, "dgrad": Direction.IMAGES, "wgrad": Direction.WEIGHT}
SAME = 0.1  # of a workspace, or 1 MiB


class RecordedAllocator(CachingAllocator):
    """The simulated allocator, with its segments where the recording has them.

    Args:
        recording: with the segments at its start, and those that came and went.
    """

    def __init__(self, recording: Mapping[str, Any]) -> None:
        super().__init__()
        self._came = [tuple(segment) for segment in recording["segments"]]
        ranks = [rank for rank, *_ in recording["start"]] + [rank for *_, rank in self._came]
        self._room = POOL_BYTES // (2 + max(ranks, default=0)) // 512 * 512
        self._sizes, self._event = recording["sizes"], 0
        self._blocks: dict[int, Block] = {}
        self.differences: list[int] = []
        for rank, size, held in recording["start"]:
            self._begin(rank, size, held)
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_allocated_bytes = self.allocated_bytes

    def _begin(self, rank: int, size: int, held: list[list[int]]) -> None:
        """Set up a segment of the start, with the blocks in it."""
        first = self._address(rank, size)
        self._segments[first] = size
        self._reserve(size)
        self.allocated_bytes += size
        starts = [first, *(first + offset for _, offset, _ in held)]
        ends = [first] + [
            first + offset + (block_bytes or round_request(self._sizes[index]))
            for index, offset, block_bytes in held
        ]
        for at, (end, start) in enumerate(zip(ends, [*starts[1:], first + size], strict=True)):
            # What is too little to be split off belongs to the block before.
            if start - end > (0 if first < POOL_BYTES else SMALL_BYTES):
                self.free(make_block(end, start - end))
            elif at:
                end = start
            if at:
                self._blocks[held[at - 1][0]] = make_block(starts[at], end - starts[at])

    def _address(self, rank: int, size: int) -> int:
        return rank * self._room + (0 if size == segment_bytes(1) else POOL_BYTES)

    def serve(self, number: int, event: int) -> None:
        """Serve a birth or a death, and note where segments differ from the recorded ones."""
        self._event = number
        while self._came and self._came[0][0] == number and self._came[0][1] < 0:
            self._give_back(*self._came.pop(0)[1:])
        if event < 0:
            self.free(self._blocks.pop(~event))
        elif self._sizes[event]:
            self._blocks[event] = self.malloc(self._sizes[event])
        if self._came and self._came[0][0] <= number:
            self.differences.append(number)
            self._came = [segment for segment in self._came if segment[0] > number]

    def _give_back(self, size: int, rank: int) -> None:
        block = make_block(self._address(rank, -size), -size)
        free = self._free[-size != segment_bytes(1)]
        if self._segments.get(address_of(block)) == -size and block in free:
            self._release(free, free.index(block))
        else:
            self.differences.append(self._event)

    def _new_block(self, pool: int, size: int) -> Block:
        segment = segment_bytes(size)
        if not self._came or self._came[0][:2] != (self._event, segment):
            self.differences.append(self._event)
            return super()._new_block(pool, size)
        address = self._address(self._came.pop(0)[2], segment)
        self._reserve(segment)
        self._segments[address] = segment
        return make_block(address, segment)


def replay(recording: Mapping[str, Any]) -> dict[str, Any]:
    """Replay a recording; count its requests, and those that were served otherwise."""
    allocator = RecordedAllocator(recording)
    for number, event in enumerate(recording["events"]):
        allocator.serve(number, event)
    return {
        "requests": sum(event >= 0 for event in recording["events"]),
        "segments": len(recording["segments"]),
        "differences": len(set(allocator.differences)),
        "peak_allocated_bytes": allocator.peak_allocated_bytes - recording["peak_allocated"],
        "peak_reserved_bytes": allocator.peak_reserved_bytes - recording["peak_reserved"],
    }


def check_workspaces(calls: list[dict[str, Any]], gpu: Gpu, batch: int = 32) -> dict[str, int]:
    """Count the recorded calls of cuDNN, and those whose workspace is simulated closely."""
    same = number = 0
    for call in calls:
        match = re.match(r"(\d+)->(\d+) (\d)x\d/(\d) @(\d+)", call["layer"])
        assert match is not None
        inputs, filters, side, stride, pixels = map(int, match.groups())
        with torch.device("meta"):
            images = torch.empty(batch, inputs, pixels, pixels)
            outputs = torch.empty(batch, filters, pixels // stride, pixels // stride)
            weight = torch.empty(filters, inputs, side, side)
        convolution = Convolution(images, outputs, weight, [stride] * 2, [1] * 2)
        found = convolution.workspace_bytes(DIRECTIONS[call["direction"]], gpu.compute_capability)
        same += sum(abs(found - real) <= max(MIB, SAME * real) for real in call["real"])
        number += len(call["real"])
    return {"calls": number, "same": same}


def trace_step(
    model: nn.Module,
    inputs: Iterable[Tensor],
    loss_of: Callable[..., Tensor],
    gpu: Gpu,
    torch_version: tuple[int, int],
    *,
    buckets: bool = False,
) -> Trace:
    """Trace two steps of SGD with momentum, as of 2021: gradients are kept, and set to zero.

    Args:
        model: without data.
        inputs: of the model, on the host.
        loss_of: computes the loss from the model and its inputs.
        gpu: that trains.
        torch_version: of the PyTorch that was used.
        buckets: whether DistributedDataParallel keeps the gradients once more.
    """
    with fake_cuda(gpu.compute_capability, torch_version=torch_version) as mode:
        model = fake_copy(model, mode, model).train()
        workspaces = CudaWorkspaces(gpu.compute_capability, set(), torch_version=torch_version)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        with StorageTracker(1, model, workspaces) as tracker:
            for tensor in [*model.parameters(), *model.buffers()]:
                tracker.track(tensor, Kind.PARAMETER)
            copies = [torch.empty_like(p) for p in model.parameters()] if buckets else []
            for _ in range(3):
                tracker.begin_step()
                batch = [torch.empty(x.shape, dtype=x.dtype) for x in inputs]
                optimizer.zero_grad(set_to_none=False)
                loss = loss_of(model, *batch)
                loss.backward()
                optimizer.step()
            del copies
        return tracker.trace


def peak_bytes(trace: Trace, gpu: Gpu, first: int = 0) -> int:
    """Return the most bytes in use, in blocks, above what is in use at an event."""
    blocks = []
    for storage in trace.storages:
        rule = storage.rule
        size = rule.bytes_of(*rule.amounts, gpu) if rule else storage.size_bytes
        blocks.append(round_request(size) if size else 0)
    events = [event for event in trace.events[first:] if event != EMPTY_CACHE]
    return max(accumulate(blocks[e] if e >= 0 else -blocks[~e] for e in events))


def check_resnet(recording: Mapping[str, Any], gpu: Gpu) -> float:
    """Return how far the peak of a rebuilt step is from the recorded one, as a share of it."""
    import parts.torchvision_without_cuda  # noqa: F401 - torchvision's operators, where it has none

    models = importlib.import_module("torchvision.models")
    with torch.device("meta"):
        inputs = [torch.empty(32, 3, 224, 224), torch.empty(32, dtype=torch.long)]
        model = models.resnet50()
    trace = trace_step(
        model, inputs, lambda model, x, y: nn.functional.cross_entropy(model(x), y), gpu, (1, 9)
    )
    recorded = max(accumulate(recording["signed_bytes"]))
    return peak_bytes(trace, gpu, trace.steps[-1]) / recorded - 1


def check_segmentation(row: Mapping[str, str], gpu: Gpu) -> float:
    """Return how far a simulated peak is from a row of MMSegmentation's tables, as a share."""
    sides = [int(side) for side in row["seq_or_res"].split("x")]
    height, width = sides if len(sides) == 2 else sides * 2
    batch = int(row["batch"])
    with torch.device("meta"):
        model = build(row["model"])
        inputs = [
            torch.empty(batch, 3, height, width),
            torch.empty(batch, height, width, dtype=torch.long),
        ]
    trace = trace_step(model, inputs, lambda model, x, y: model(x, y), gpu, (1, 6), buckets=True)
    return peak_bytes(trace, gpu) / (float(row["reported"]) * GIB) - 1


def main() -> None:
    """Replay and compare; print a table, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--published", type=Path)
    options = parser.parse_args()
    v100 = find_gpu("V100 32GB")
    found: dict[str, Any] = {"replays": {}, "segmentation": {}}
    for path in sorted(options.folder.rglob("*.json")):
        recording = json.loads(path.read_text())
        if path.stem == "v100_resnet50_conv_workspaces":
            found["workspaces"] = check_workspaces(recording, v100)
            print(f"{path.stem}: {found['workspaces']}")
        elif path.stem == "v100_resnet50_b32_step":
            found["resnet50_step"] = round(check_resnet(recording, v100), 4)
            print(f"{path.stem}: peak {found['resnet50_step']:+.2%}")
        elif isinstance(recording, dict) and "events" in recording:
            found["replays"][path.stem] = replay(recording)
            print(f"{path.stem}: {found['replays'][path.stem]}")
    if not found["replays"]:
        parser.error(f"there is no recording of an allocator in {options.folder}")
    if options.published:
        with options.published.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if "mmsegmentation" in row["source"]]
        for row in rows:
            name = f"{row['model']} {row['seq_or_res']}"
            found["segmentation"][name] = round(check_segmentation(row, v100), 4)
            print(f"{found['segmentation'][name]:+.1%} {name}", flush=True)
        errors = [abs(error) for error in found["segmentation"].values()]
        found["segmentation_median"] = round(statistics.median(errors), 4)
        print(f"segmentation: median {found['segmentation_median']:.1%} of {len(errors)} rows")
    requests = sum(replayed["requests"] for replayed in found["replays"].values())
    differences = sum(replayed["differences"] for replayed in found["replays"].values())
    print(f"{requests - differences} of {requests} requests as recorded")
    (ROOT / "scripts/results/recordings.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
