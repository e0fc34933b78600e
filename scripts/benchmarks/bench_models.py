"""Benchmark on models that people train: transformers and timm, with random weights, on the CPU.

    python scripts/benchmarks/bench_models.py  # hours on 2 cores
    python scripts/benchmarks/bench_models.py --model efficientnet --model whisper --seconds 120

For each model: the size that `find` answers under a real limit; whether it trains 50 further steps
in a fresh process (or as many as fit into ``--seconds``; how many is recorded); whether 1.2 times
as many run out of memory; and what `estimate` says of a GPU with the same memory, whose process
takes as much beside its tensors as one on the CPU does. Writes each row as it comes to
scripts/results/models.json. Needs transformers, and timm with torchvision.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

from parts.case import RESULTS, Case, judged, save
from rendering import MODELS, models

RESULT_FILE = RESULTS / "models.json"
LIMIT = "4GiB"

# What a process with PyTorch and the libraries of the models holds before the model.
OVERHEAD = "400MiB"


def main() -> None:
    """Run the models asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--limit", default=LIMIT)
    parser.add_argument("--seconds", type=float, default=900, help="for each of the judge's runs")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    options = parser.parse_args()
    results: dict[str, Any] = {"models": {}}
    if options.model and options.output.exists():
        results = json.loads(options.output.read_text())
    results["glibc_tunables"] = os.environ.get("GLIBC_TUNABLES", "")
    results["versions"] = {
        name: importlib.metadata.version(name) for name in ("torch", "transformers", "timm")
    }
    for model in options.model or MODELS:
        case = Case(model, f"scripts/benchmarks/parts/real_models.py:build_{model}", options.limit)
        row = judged(case, case.find(), seconds=options.seconds)
        estimate = case.estimate(OVERHEAD)
        row["estimate"] = estimate.get("batch_size", estimate.get("error"))
        row["judge_seconds"] = options.seconds
        results["models"][model] = row
        print(f"{case.name}: {row}", file=sys.stderr, flush=True)
        save(options.output, results)
    print(models(results["models"]))
    if not all(row["survives"] and row["is_tight"] for row in results["models"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
