#!/usr/bin/env python3
"""Record what PyTorch's own caching allocator does, as facts for tests/simulation/test_recorded.py.

    scripts/counting_cuda/run.sh python scripts/counting_cuda/record.py

Random requests under a limit, with each setting of the allocator; and of the bundled GPT whole
training steps, and how many of ten run under a limit. A setting is fixed once the allocator is in
use, so each runs in a process of its own.
"""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
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
TEN_STEPS_LIMIT_BYTES = 1024 * MIB
TEN_STEPS_SIZES = {"fp32": range(36, 52), "bf16": range(46, 70)}
MODEL = {"width": 256, "depth": 4, "vocabulary": 5000, "max_tokens": 128}


def main() -> None:
    """Record one kind of fact, or all of them in processes of their own."""
    if len(sys.argv) == 2:
        facts = {"requests": requests, "steps": steps, "ten_steps": ten_steps}[sys.argv[1]]()
        print(json.dumps(facts))
        return
    FACTS.mkdir(exist_ok=True)
    for name, setting in SETTINGS.items():
        write(f"requests_{name}", run("requests", setting))
    write("steps_gpt", run("steps", ""))
    write("ten_steps_gpt", run("ten_steps", ""))


def run(kind: str, setting: str) -> dict[str, Any]:
    """One kind of fact under a setting of the allocator."""
    command = [sys.executable, __file__, kind]
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


def requests(count: int = 160, seed: int = 7) -> dict[str, Any]:
    """Requests and releases of random blocks, and what the allocator held after each.

    An event is the bytes asked for, or -1 - i for the release of what the i-th event got. What it
    held is: allocated and reserved bytes, and how often it had to flush its cache; null where it
    was out of memory.
    """
    chance = random.Random(seed)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total)
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
                live[event] = torch.empty(events[-1], dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                held.append(None)
                continue
        stats = torch.cuda.memory_stats()
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_alloc_retries")
        held.append([stats[name] for name in names])
    return {"capacity_bytes": int(LIMIT_BYTES / total * total), "events": events, "held": held}


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
