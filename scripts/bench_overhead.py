"""Benchmark of what probing adds to a training step: the probe's step against a bare one.

    python scripts/bench_overhead.py --device cpu

Both run in this process in turn, each after the same clean-up, and the medians are compared: a
machine that is slow for a while is slow for both. Writes scripts/results/overhead_cpu.json, or the
same for another device.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from statistics import median

import torch
from bench_case import RESULTS, ROOT, markdown_table, save
from torch import nn
from torch.utils._pytree import tree_map

from batchfinder.probing.devices.choose import choose_device
from batchfinder.probing.devices.versions import versions
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.here import Here
from batchfinder.probing.workers.supervisor import Supervisor
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.target import load_target

GOAL = 0.03
FAMILIES = ("mlp", "vit", "gpt")


def main() -> None:
    """Measure each model, and end with the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    rows = []
    overheads = {}
    for family in FAMILIES:
        bare, probed = measure(family, options.device, options.batch_size, options.rounds)
        overheads[family] = probed / bare - 1
        share = f"{overheads[family]:+.1%}"
        rows.append((family, f"{1000 * bare:.1f} ms", f"{1000 * probed:.1f} ms", share))
    middle = median(overheads.values())
    print(markdown_table(("model", "bare step", "step in a probe", "overhead"), rows))
    print(f"\nmedian overhead {middle:+.1%}, goal at most {GOAL:.0%}")
    kind = torch.device(options.device).type
    content = {"versions": versions(), **vars(options), "overheads": overheads, "median": middle}
    save(RESULTS / f"overhead_{kind}.json", content)
    if middle > GOAL:
        sys.exit(1)


def measure(family: str, device: str, batch_size: int, rounds: int) -> tuple[float, float]:
    """Median seconds of the bare step and of the step in a probe."""
    setup = load_target(str(ROOT / f"scripts/examples/train_{family}.py:build_model"))
    prober = Supervisor(Here(setup), ProbeOptions(device=device))
    bare: list[float] = []
    probed: list[float] = []
    try:
        prober.probe(batch_size)
        step = BareStep(setup, torch.device(device), batch_size)
        step.run()
        for _ in range(rounds):
            clean_up(device)
            bare.append(step.run())
            clean_up(device)
            probed.append(prober.probe(batch_size).step_seconds or float("nan"))
    finally:
        prober.close()
    return median(bare), median(probed)


class BareStep:
    """A training step as a plain loop has it, on the same model and the same batches."""

    def __init__(self, setup: TrainingSetup, device: torch.device, batch_size: int) -> None:
        self.model = setup.model
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batches = BatchMaker(setup.sample)
        self.device = device
        self.batch_size = batch_size

    def run(self) -> float:
        """One step; the seconds it took."""
        started = time.perf_counter()
        batch = tree_map(lambda leaf: leaf.to(self.device), self.batches.make(self.batch_size))
        if isinstance(batch, dict):
            loss = self.model(**batch)["loss"]
        else:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started


def clean_up(device: str) -> None:
    """What a probe does after itself, so that both begin alike."""
    gc.collect()
    choose_device(device).release_cache()


if __name__ == "__main__":
    main()
