#!/usr/bin/env python3
"""Record what PyTorch's own caching allocator does, as facts for tests/simulation/test_recorded.py.

    scripts/counting_cuda/run.sh python scripts/counting_cuda/record.py [NAME ...]

Random requests under a limit, with each setting of the allocator, and from several streams; what
random sums ask for; and of the bundled GPT the peaks of whole training steps, all that one of them
asks for, and how many of ten run under a limit. A setting is fixed once the allocator is in use, so
each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
FACTS = ROOT / "tests/simulation/recorded"
MIB = 2**20
LIMIT_BYTES = 300 * MIB
SETTINGS = {
    "default": "",
    "expandable_segments": "expandable_segments:True",
    "max_split_size": "max_split_size_mb:64",
    "roundup_power2_divisions": "roundup_power2_divisions:4",
}
STEPS = [
    {"precision": precision, "optimizer": optimizer, "accumulate": accumulate, "batch_size": size}
    for precision, optimizer, accumulate, size in (
        ("fp32", "adamw", False, 8),
        ("fp32", "adagrad", False, 8),
        ("bf16", "adamw", True, 8),
        ("bf16", "sgd", False, 32),
        ("fp16", "adam", False, 32),
    )
]
ONE_DIMENSION = ("max", "min", "argmax", "argmin")
REDUCTIONS = (*ONE_DIMENSION, "amax", "amin", "vector_norm", "var")
TEN_STEPS_LIMIT_BYTES = 1024 * MIB
TEN_STEPS_SIZES = {"fp32": range(36, 52), "bf16": range(46, 70)}
MODEL = {"width": 256, "depth": 4, "vocabulary": 5000, "max_tokens": 128}


def main() -> None:
    """Record some facts, or all of them, in processes of their own."""
    kinds = {
        **{f"requests_{name}": (requests, setting) for name, setting in SETTINGS.items()},
        "requests_streams": (lambda: requests(streams=3), ""),
        "sums": (sums, ""),
        "reductions": (lambda: sums(REDUCTIONS, seed=11), ""),
        "steps_gpt": (steps, ""),
        "requests_of_a_step": (requests_of_a_step, ""),
        "ten_steps_gpt": (ten_steps, ""),
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*kinds, []], metavar="NAME")
    parser.add_argument("--here", action="store_true", help="print one, recorded in this process")
    options = parser.parse_args()
    for name in options.names or kinds:
        kind, setting = kinds[name]
        if options.here:
            print(json.dumps(kind()))
        else:
            write(name, run(name, setting))


def run(name: str, setting: str) -> dict[str, Any]:
    """One kind of fact under a setting of the allocator."""
    command = [sys.executable, __file__, "--here", name]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    recorded = (
        f"PyTorch {torch.__version__}, its own CUDA caching allocator on the counting runtime of "
        "scripts/counting_cuda (no GPU), compute capability 9.0; by record.py there"
    )
    return {"recorded": recorded, "settings": setting, **json.loads(done.stdout)}


def write(name: str, facts: dict[str, Any]) -> None:
    """One fact a line, lists of numbers without spaces."""
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items())
    (FACTS / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def requests(count: int = 160, seed: int = 7, streams: int = 1) -> dict[str, Any]:
    """Requests and releases of random blocks, and what the allocator held after each.

    The streams take turns: event i comes from stream i modulo their number.

    An event is the bytes asked for, or -1 - i for the release of what the i-th event got. What it
    held is: allocated and reserved bytes, and how often it had to flush its cache; null where it
    was out of memory.
    """
    chance = random.Random(seed)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total)
    places = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(1, streams))]
    live: dict[int, torch.Tensor] = {}
    events: list[int] = []
    held: list[list[int] | None] = []
    for event in range(count):
        if live and chance.random() < 0.45:
            released = chance.choice(list(live))
            del live[released]
            events.append(-1 - released)
        else:
            largest = chance.choice([4096, MIB, 20 * MIB, 120 * MIB])
            events.append(chance.randint(1, largest))
            try:
                with torch.cuda.stream(places[event % streams]):
                    live[event] = torch.empty(events[-1], dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                held.append(None)
                continue
        stats = torch.cuda.memory_stats()
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_alloc_retries")
        held.append([stats[name] for name in names])
    capacity = int(LIMIT_BYTES / total * total)
    return {"capacity_bytes": capacity, "streams": streams, "events": events, "held": held}


def sums(operators: Sequence[str] = ("sum",), count: int = 300, seed: int = 7) -> dict[str, Any]:
    """Sums of random tensors, or other reductions, and what each asks for beside its output.

    Of each: the operator, the type, shape, strides and first element of the tensor, the dimensions
    that are reduced, and the bytes.
    """
    chance = random.Random(seed)
    lengths = [1, 3, 7, 16, 49, 64, 100, 128, 197, 256, 768, 1000, 1024, 3000, 4096, 8192, 50000]
    types = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    recorded: list[list[Any]] = []
    while len(recorded) < count:
        shape = chance.choices(lengths, k=chance.randint(1, 4))
        if math.prod(shape) > 1 << 26:
            continue
        tensor = torch.empty(shape, dtype=chance.choice(types), device="cuda")
        if chance.random() < 0.3:
            tensor = tensor.transpose(0, chance.randrange(len(shape)))
        if len(shape) == 4 and chance.random() < 0.4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        if chance.random() < 0.2 and tensor.size(-1) > 2:
            tensor = tensor[..., 1:]
        name = chance.choice(operators) if len(operators) > 1 else operators[0]
        most = 1 if name in ONE_DIMENSION else len(shape)
        dims = sorted(chance.sample(range(len(shape)), chance.randint(1, most)))
        operator = getattr(torch, name, None) or getattr(torch.linalg, name)
        given = dims[0] if name in ONE_DIMENSION else dims
        asked = asked_for(lambda run=operator, x=tensor, dim=given: run(x, dim=dim))
        beside = asked[2 if name in ("max", "min") else 1 :]
        if beside or chance.random() < 0.2:  # most take nothing
            recorded.append(
                [name, str(tensor.dtype)[6:], list(tensor.shape), list(tensor.stride()),
                 tensor.storage_offset(), dims, beside]
            )  # fmt: skip
    processor = torch.cuda.get_device_properties(0)
    threads = processor.multi_processor_count * processor.max_threads_per_multi_processor
    return {"threads": threads, "sums": recorded}


def asked_for(run: Callable[[], Any]) -> list[int]:
    """The bytes that something asks the allocator for, in order."""
    torch.cuda.memory._record_memory_history(context=None)
    kept = run()
    (events,) = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    del kept
    return [event["size"] for event in events if event["action"] == "alloc"]


def requests_of_a_step() -> dict[str, Any]:
    """All that the second training step of the bundled GPT asks for."""
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts/examples")]
    asked = {}
    for precision in ("fp32", "bf16"):
        train = trainer(precision, "adamw", False, 16)
        train()
        asked[precision] = asked_for(train)
        del train
    return {"model": MODEL, "batch_size": 16, **asked}


def steps() -> dict[str, Any]:
    """The peaks of training steps of the bundled GPT."""
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts/examples")]
    return {"model": MODEL, "steps": [{**step, **peaks(**step)} for step in STEPS]}


def peaks(precision: str, optimizer: str, accumulate: bool, batch_size: int) -> dict[str, int]:
    """The highest peaks of two training steps, with an empty allocator before them."""
    train = trainer(precision, optimizer, accumulate, batch_size)
    for _ in range(2):
        train()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def ten_steps() -> dict[str, Any]:
    """How many of ten training steps ran under a limit, batch size by batch size.

    Of each: the size, the steps that ran, and if all did, the peak of the reserved bytes and how
    often the last step had to flush the allocator's cache.
    """
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts/examples")]
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(TEN_STEPS_LIMIT_BYTES / total)
    ran = {
        precision: [[size, *survival(precision, size)] for size in sizes]
        for precision, sizes in TEN_STEPS_SIZES.items()
    }
    return {"model": MODEL, "capacity_bytes": int(TEN_STEPS_LIMIT_BYTES / total * total)} | ran


def survival(precision: str, batch_size: int) -> list[int]:
    """The steps that ran; if all ten did, the bytes reserved at most, the last step's retries."""
    train = trainer(precision, "adamw", False, batch_size)
    retries = 0
    for step in range(10):
        before = retries
        try:
            train()
        except torch.OutOfMemoryError:
            return [step]
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
    return [10, torch.cuda.max_memory_reserved(), retries - before]


def trainer(
    precision: str, optimizer: str, accumulate: bool, batch_size: int
) -> Callable[[], None]:
    """What trains one step, with an empty allocator before the first."""
    import train_gpt

    from batchfinder.training.setup import TrainingSetup
    from batchfinder.training.step import TrainingStep

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.memory_allocated() == 0, "something was left of the case before"
    setup = TrainingSetup(train_gpt.build_model(**MODEL), None, optimizer=optimizer)
    device = torch.device("cuda")
    step = TrainingStep(setup, device, precision=precision, accumulate=accumulate)
    sizes = {"vocabulary": MODEL["vocabulary"], "max_tokens": MODEL["max_tokens"]}
    sample = train_gpt.build_sample(batch_size, **sizes)

    def on_device() -> dict[str, torch.Tensor]:
        return {name: tensor.to(device) for name, tensor in sample.items()}

    def train() -> None:
        for batch in step.fetch(on_device):
            step.forward_backward(batch)
        step.optimizer_step()

    return train


if __name__ == "__main__":
    main()
