"""The simulation against what PyTorch's own allocator did: scripts/counting_cuda/record.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfinder.probing.devices.allocator.blocks import Block
from batchfinder.probing.devices.allocator.caching import (
    AllocatorSettings,
    DeviceFullError,
)
from batchfinder.probing.devices.allocator.expandable import allocator_of
from batchfinder.probing.options import ProbeOptions
from batchfinder.simulation.gpus import NO_GPU, Gpu, find_gpu
from batchfinder.simulation.kernels.reductions import EXTREME, MOMENTS, PLACE, SUM, reduction
from batchfinder.simulation.kernels.torch_version import TORCH_VERSION
from batchfinder.simulation.prober import SimulatedProber
from batchfinder.simulation.tracing.step_trace import StepTraces
from batchfinder.training.target import load_target
from batchfinder.units import MIB

RECORDED = Path(__file__).parent / "recorded"
EXAMPLES = Path(__file__).parents[2] / "scripts/examples"
PARTS = {
    **dict.fromkeys(("sum", "vector_norm"), SUM),
    **dict.fromkeys(("amax", "amin"), EXTREME),
    **dict.fromkeys(("max", "min", "argmax", "argmin"), PLACE),
    "var": MOMENTS,
}
SETTINGS = {
    "default": AllocatorSettings(),
    "expandable_segments": AllocatorSettings(expandable_segments=True),
    "max_split_size": AllocatorSettings(max_split_size_bytes=64 * MIB),
    "roundup_power2_divisions": AllocatorSettings(roundup_power2_divisions=4),
    "streams": AllocatorSettings(),
}


def recorded(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return facts


def traces_of_gpt(
    model: dict[str, int], optimizer: str, options: ProbeOptions, gpu: Gpu
) -> StepTraces:
    setup = load_target(f"{EXAMPLES}/train_gpt.py:build_model", model)
    setup = dataclasses.replace(setup, optimizer=optimizer)
    return StepTraces(setup, options, gpu.compute_capability)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_request_leaves_the_same_state_as_in_pytorch(name: str) -> None:
    facts, settings = recorded(f"requests_{name}"), SETTINGS[name]
    allocator = allocator_of(facts["capacity_bytes"], settings)
    blocks: dict[int, Block] = {}
    held: list[list[int] | None] = []
    for index, event in enumerate(facts["events"]):
        if event < 0:
            allocator.free(blocks[-1 - event])
        else:
            try:
                blocks[index] = allocator.malloc(event, index % facts.get("streams", 1))
            except DeviceFullError:
                held.append(None)
                continue
        held.append([allocator.allocated_bytes, allocator.reserved_bytes, allocator.retries])

    assert held == facts["held"]
    assert None in held


@pytest.mark.parametrize(("name", "with_buffers"), [("sums", 161), ("reductions", 139)])
def test_reductions_use_what_they_used_in_pytorch(name: str, with_buffers: int) -> None:
    """The buffers in which blocks of threads share a sum, and their semaphores."""
    facts = recorded(name)
    gpu = dataclasses.replace(NO_GPU, threads=facts["threads"])
    found = []
    for operator, dtype, shape, strides, offset, dims, _ in facts["sums"]:
        storage = torch.empty(0, dtype=getattr(torch, dtype), device="meta")
        tensor = storage.as_strided(shape, strides, offset)
        kernel = reduction(tensor, dims, tensor.element_size(), PARTS[operator])
        work = tensor.numel() // kernel.outputs, kernel.outputs, gpu
        found.append([n for n in (kernel.buffer_bytes(*work), kernel.semaphore_bytes(*work)) if n])

    assert found == [beside for *_, beside in facts["sums"]]
    assert len([1 for sizes in found if sizes]) == with_buffers


# Read off the same: the sums of columns of such a matrix, of more than 2 GiB.
@pytest.mark.parametrize(
    ("rows", "dtype", "mebibytes"), [(1 << 22, torch.float32, 256), (1 << 24, torch.bfloat16, 512)]
)
def test_tensors_beyond_32_bits_are_summed_in_parts(
    rows: int, dtype: torch.dtype, mebibytes: int
) -> None:
    kernel = reduction(torch.empty(rows, 1024, dtype=dtype, device="meta"), [0], dtype.itemsize)
    assert kernel.buffer_bytes(rows, 1024, find_gpu("h100")) == mebibytes * MIB


@pytest.mark.parametrize(("shape", "dim"), [((2, 1 << 30), 0), ((1 << 30, 2), 1)])
def test_more_sums_than_32_bits_can_count_are_made_in_parts(
    shape: tuple[int, int], dim: int
) -> None:
    """Sums of few elements need no buffer."""
    kernel = reduction(torch.empty(shape, device="meta"), [dim], 4)
    assert kernel.buffer_bytes(2, 1 << 30, find_gpu("t4")) == 0


def test_a_large_tensor_is_split_along_its_outermost_dimension() -> None:
    """Rows that are summed stay whole, so each part has fewer sums."""
    rows = reduction(torch.empty(1024, 1 << 22, device="meta"), [1], 4)
    whole, eighth = (rows.buffer_bytes(1 << 22, count, find_gpu("h100")) for count in (1024, 128))
    assert whole == eighth > 0


REQUESTS = recorded("requests_of_a_step")


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="recorded with PyTorch 2.13")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_makes_the_same_requests_as_in_pytorch(precision: str) -> None:
    """The requests are equal one by one, in order."""
    gpu = find_gpu("h200")
    traces = traces_of_gpt(REQUESTS["model"], "adamw", ProbeOptions(precision=precision), gpu)

    trace = traces.at(REQUESTS["batch_size"])

    sizes = trace.sizes(REQUESTS["batch_size"], gpu)
    asked = [sizes[event] for event in trace.events[trace.last_step :] if event >= 0]
    assert [size for size in asked if size] == REQUESTS[precision]


STEPS = recorded("steps_gpt")


# Earlier releases keep other tensors in the backward pass, and were not recorded.
@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="recorded with PyTorch 2.13")
@pytest.mark.parametrize("step", STEPS["steps"], ids=lambda s: f"{s['precision']}-{s['optimizer']}")
def test_a_step_has_the_same_peak_as_in_pytorch(step: dict[str, Any]) -> None:
    options = ProbeOptions(precision=step["precision"], accumulate=step["accumulate"])
    gpu = find_gpu("h200")
    traces = traces_of_gpt(STEPS["model"], step["optimizer"], options, gpu)

    run = SimulatedProber(traces, gpu, options).replay(step["batch_size"])

    assert run.peak_allocated_bytes == step["peak_allocated_bytes"]
    assert run.peak_reserved_bytes == step["peak_reserved_bytes"]


TEN_STEPS = recorded("ten_steps_gpt")


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="recorded with PyTorch 2.13")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ten_steps_fit_exactly_if_they_fit_in_pytorch(precision: str) -> None:
    """Some sizes run out of memory only in the third, fourth or sixth step."""
    h200 = find_gpu("h200")
    gpu = dataclasses.replace(h200, total_bytes=TEN_STEPS["capacity_bytes"], overhead_bytes=0)
    options = ProbeOptions(precision=precision, headroom=0.0)
    traces = traces_of_gpt(TEN_STEPS["model"], "adamw", options, gpu)
    prober = SimulatedProber(traces, gpu, options)
    steps_run = {size: steps for size, steps, *_ in TEN_STEPS[precision]}
    held = {size: held for size, _, *held in TEN_STEPS[precision] if held}

    runs = {size: prober.replay(size) for size in steps_run}

    assert {0 < steps < 10 for steps in steps_run.values()} == {True, False}
    assert held == {
        size: [run.peak_reserved_bytes, run.retries]
        for size, run in runs.items()
        if run.fits and not run.retries
    }
