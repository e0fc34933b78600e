r"""What a search costs with PyTorch's own caching allocator, without a GPU.

    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_counted_search.py \
        [--start-from-estimate]

Searches in this process on a CUDA runtime that only counts memory (see ``scripts/counting_cuda``):
limits, fragmentation, retries and out-of-memory errors are those of PyTorch's allocator; kernels do
nothing, and cuDNN is off, so convolutions and LSTMs take other memory than on a GPU. Each answer is
judged: a plain training loop in a fresh process, limited to the search's budget, runs 50 steps, or
as many as fit into a minute. Needs a build of PyTorch with CUDA. Writes each row as it comes to
scripts/results/search_counted.json, or with estimates to search_counted_from_estimate.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from parts.case import RESULTS, ROOT, SURVIVAL_STEPS, run_for_json, save, survived
from parts.paper_devices import FAMILIES, LIMITS_GIB, PRECISIONS, costs_table

from batchfinder import BatchSizeResult, find_max_batch
from batchfinder.training.loading import load_setup
from batchfinder.units import GIB

JUDGE_SECONDS = 60


def main() -> None:
    """Search for every family, precision and limit; exit with 1 unless all answers survive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--start-from-estimate", action="store_true")
    options = parser.parse_args()
    name = "search_counted" + ("_from_estimate" if options.start_from_estimate else "")
    warnings.simplefilter("ignore")  # of models without a learning-rate scheduler, and the like
    rows: list[dict[str, Any]] = []
    for family, arguments in FAMILIES.items():
        target = str(ROOT / "scripts" / "examples" / f"train_{family}.py:build_model")
        for precision in PRECISIONS:
            for limit in LIMITS_GIB:
                setup, _ = load_setup(target, arguments)
                result = find_max_batch(
                    setup,
                    device="cuda",
                    precision=precision,
                    memory_limit=limit and limit * GIB,
                    start_from_estimate=options.start_from_estimate,
                )
                rows.append(
                    {
                        "family": family,
                        "precision": precision,
                        "limit_gib": limit,
                        "batch_size": result.batch_size,
                        "estimated": result.estimated_batch_size,
                        "next_failure": result.next_failure and result.next_failure.batch_size,
                        "probes": len(result.probes),
                        "full_size_steps": result.cost_full_size_steps,
                        "sizes": [probe.batch_size for probe in result.probes],
                        "confirmed": [p.batch_size for p in result.probes if p.confirmed],
                        "budget_bytes": result.budget_bytes,
                        "survival": judged(target, arguments, precision, result),
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
                save(
                    RESULTS / f"{name}.json",
                    {"versions": {"torch": torch.__version__}, "searches": rows},
                )
    print(costs_table(rows))
    sys.exit(not all(survived(row["survival"]) for row in rows))


def judged(
    target: str, arguments: Mapping[str, object], precision: str, result: BatchSizeResult
) -> dict[str, Any]:
    """What a fresh process says that trains at the answer, and may take no more than the search."""
    command = ["scripts/benchmarks/parts/train_at.py", target, str(result.batch_size)]
    command += ["--arguments", json.dumps(arguments), "--precision", precision]
    command += ["--device", "cuda:0", "--memory-limit", str(result.budget_bytes)]
    command += ["--steps", str(SURVIVAL_STEPS), "--seconds", str(JUDGE_SECONDS)]
    return run_for_json(command, math.inf)


if __name__ == "__main__":
    main()
