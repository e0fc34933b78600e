"""Benchmark of what further GPUs cost in an estimate: ten of them against one.

    python scripts/bench_gpus.py [--rounds N]

Counts the seconds that the processor spends on one and on ten GPUs in turn, in the fastest of some
rounds each: what else runs on the machine only adds to them. Once for the whole command
``batchfinder estimate``, with Python and its imports, and once for the estimate alone, in a process
that is warm. And the sizes that are replayed. Writes scripts/results/estimate_gpus.json.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from bench_case import RESULTS, ROOT, markdown_table, save

from batchfinder.estimator import estimate_on_gpus
from batchfinder.probing.devices.versions import versions
from batchfinder.probing.options import ProbeOptions
from batchfinder.simulation.estimate import Estimate
from batchfinder.simulation.gpus import find_gpu
from batchfinder.training.target import load_target

GPUS = (
    "RTX 3090", "RTX 4090", "A10", "A100 40GB", "A100 80GB", "L4", "L40S", "RTX A6000", "H100 SXM",
    "H200",
)  # fmt: skip
MODELS = {
    "ViT-B/16": ("vit", {"width": 768, "depth": 12, "image_size": 224, "patch_size": 16}),
    "GPT, 12 layers of 768": ("gpt", {"width": 768, "depth": 12, "vocabulary": 50257}),
    "ResNet of 9 blocks": ("resnet", {"width": 64, "blocks": 3}),
}


def main() -> None:
    """Measure each model, and end with the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: measure(*model, options.rounds) for name, model in MODELS.items()}
    rows = [
        (name, *[f"{m[key]:.2f}" for key in list(m)[:-1]], m["replays"])
        for name, m in models.items()
    ]
    header = ("model", "command, one GPU [s]", "ten [s]", "ratio")
    header += ("estimate alone, one [s]", "ten [s]", "ratio", "sizes replayed for ten")
    print(markdown_table(header, rows))
    content = {"versions": versions(), **vars(options), "gpus": GPUS, "models": models}
    save(RESULTS / "estimate_gpus.json", content)


def measure(family: str, arguments: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The least seconds that one and ten GPUs take, their ratio, and the sizes replayed for ten."""
    target = str(ROOT / f"scripts/examples/train_{family}.py:build_model")
    given = [f"--arg={name}={value}" for name, value in arguments.items()]
    pairs = [(command(target, given, 1), command(target, given, len(GPUS))) for _ in range(rounds)]
    command_one, command_ten = (min(seconds) for seconds in zip(*pairs, strict=True))
    setup = load_target(target, arguments)
    gpus = [find_gpu(name) for name in GPUS]

    def run(number: int) -> tuple[float, list[Estimate]]:
        gc.collect()
        started = time.process_time()
        estimates = estimate_on_gpus(setup, gpus[:number], ProbeOptions())
        return time.process_time() - started, estimates

    run(1)  # the first one warms PyTorch up
    pairs = [(run(1)[0], run(len(gpus))[0]) for _ in range(rounds)]
    one, ten = (min(seconds) for seconds in zip(*pairs, strict=True))
    _, estimates = run(len(gpus))
    return {
        "command_one_s": round(command_one, 3),
        "command_ten_s": round(command_ten, 3),
        "command_ratio": round(command_ten / command_one, 3),
        "one_s": round(one, 3),
        "ten_s": round(ten, 3),
        "ratio": round(ten / one, 3),
        "replays": sum(len(estimate.result.probes) for estimate in estimates),
    }


def command(target: str, arguments: list[str], number: int) -> float:
    """The seconds of the processor that ``batchfinder estimate`` takes for so many GPUs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "batchfinder", "estimate", target, *arguments]
        + [f"--gpu={name}" for name in GPUS[:number]],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
