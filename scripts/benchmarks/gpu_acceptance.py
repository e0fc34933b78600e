r"""Acceptance on a GPU: real models under several limits, each answer judged by training.

    python scripts/benchmarks/gpu_acceptance.py  # under 8 minutes on one large GPU

Needs PyTorch with CUDA, timm and Transformers; no network. Each search runs by the command line.
Its answer must train 50 steps in a fresh process with the same memory. 1.12 times it must not, in
what the search used: the headroom beside that may hold it, most easily where batches are small or
the allocator gets along by flushing its cache in every step. The memory model of the probes below
the answer is compared with the peak measured at the answer.

The most valuable cases come first, small limits side by side on one GPU, until the time budget
ends; what was not run is listed as such. Writes scripts/results/gpu_acceptance.json after every
case. To try it without a GPU:

    python scripts/benchmarks/gpu_acceptance.py --device cpu --limits 1GiB \
        --families mlp --precisions fp32
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import product
from pathlib import Path
from typing import Any

from parts.case import RESULTS, Case, describe_device, save
from parts.gpu_report import TOO_LARGE, describe, prediction, table, verdict

from batchfinder.results.probe import Probe
from batchfinder.units import GIB, parse_bytes

FAMILIES = ("resnet50", "vit_base", "gpt2", "bert_base", "unet", "lstm")
CPU_FAMILIES = ("mlp", "resnet", "vit", "gpt")
PRECISIONS = ("bf16", "fp32")
LIMITS = ("8GiB", "24GiB", "80GiB", "all")

# First one case that has the GPU to itself; then each family twice, under a small limit and a
# larger one, side by side; after these, all others.
FIRST = (
    "gpt2 bf16 all",
    "resnet50 fp32 80GiB",
    "vit_base bf16 24GiB",
    "unet fp32 24GiB",
    "lstm bf16 8GiB",
    "bert_base bf16 80GiB",
    "gpt2 fp32 24GiB",
    "lstm fp32 24GiB",
    "resnet50 bf16 8GiB",
    "vit_base fp32 8GiB",
    "unet bf16 8GiB",
    "bert_base fp32 8GiB",
    "gpt2 bf16 8GiB",
    "resnet50 bf16 24GiB",
    "bert_base bf16 24GiB",
)

# What the search leaves free by default. The judge gets it to train at the answer.
HEADROOM = 0.05

# What a process takes on the GPU besides its limit: the context, while a worker is replaced twice.
EXTRA_BYTES = GIB

# One case needs about two processor cores: a search or a judge, and its workers starting.
AT_ONCE = 6

# No case is begun with less time left than this.
LEAST_SECONDS = 75


def main() -> None:
    """Run the cases in time, and end with the table."""
    options = parse_arguments()
    started = time.monotonic()
    deadline = started + options.time_budget
    gpu, total_bytes, _ = describe_device(options.device)
    cases = in_order(options.families, options.limits, options.precisions, options.device)
    if options.device != "cpu":
        cases = [case for case in cases if is_possible(case, total_bytes)]
    rows: dict[Case, dict[str, Any]] = {}
    versions: dict[str, str] = {}

    def finish(done: Case, row: dict[str, Any]) -> None:
        versions.update(row.pop("versions", {}))
        rows[done] = row
        print(describe(row), file=sys.stderr, flush=True)
        in_plan_order = [rows[case] for case in cases if case in rows]
        data = {"device": gpu, "total_bytes": total_bytes, "versions": versions}
        save(options.output, {**data, "cases": in_plan_order})

    at_once = 1 if options.device == "cpu" else options.at_once
    with ThreadPoolExecutor(at_once) as pool:
        running: dict[Future[dict[str, Any]], Case] = {}
        waiting = list(cases)
        while waiting or running:
            case = None
            if len(running) < at_once:
                case = first_that_fits(waiting, list(running.values()), total_bytes)
            if case is None:
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    finish(running.pop(future), future.result())
                continue
            waiting.remove(case)
            if deadline - time.monotonic() < LEAST_SECONDS:
                finish(case, row_of(case) | {"verdict": "not run: no time was left"})
            else:
                judged = pool.submit(run_case, case, deadline, options.survival_seconds)
                running[judged] = case

    done = [rows[case] for case in cases]
    print(table(done))
    print(f"\n{gpu}, {time.monotonic() - started:.0f} s")
    if any(row["verdict"].startswith("failed") for row in done):
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--families", nargs="+", choices=FAMILIES + CPU_FAMILIES)
    parser.add_argument("--limits", nargs="+", default=LIMITS, help="such as 24GiB; or all")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--time-budget", type=float, default=450, help="seconds for everything")
    parser.add_argument(
        "--survival-seconds", type=float, default=40, help="end the 50 steps after so long"
    )
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="cases side by side at most")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_acceptance.json")
    options = parser.parse_args()
    if options.families is None:
        options.families = CPU_FAMILIES if options.device == "cpu" else FAMILIES
    return options


def in_order(
    families: Sequence[str], limits: Sequence[str], precisions: Sequence[str], device: str
) -> list[Case]:
    """All cases asked for, the most valuable first."""
    cases = []
    for family, limit, precision in product(families, limits, precisions):
        file = f"train_{family}.py:build_model" if device == "cpu" else f"gpu_models.py:{family}"
        cases.append(Case(family, f"scripts/examples/{file}", limit, device, precision))
    return sorted(cases, key=lambda case: (*FIRST, case.name).index(case.name))


def is_possible(case: Case, total_bytes: int) -> bool:
    """Whether the device has as much as the case's limit."""
    return case.limit == "all" or parse_bytes(case.limit) <= total_bytes


def first_that_fits(
    waiting: Sequence[Case], running: Sequence[Case], total_bytes: int
) -> Case | None:
    """The first case whose memory the running ones leave; with nothing running, just the first."""
    free_bytes = total_bytes - sum(memory_of(case, total_bytes) for case in running)
    fitting = (case for case in waiting if memory_of(case, total_bytes) <= free_bytes)
    return next(fitting if running else iter(waiting), None)


def memory_of(case: Case, total_bytes: int) -> int:
    """What a case may take of the device."""
    if case.limit == "all":
        return total_bytes
    return min(total_bytes, parse_bytes(case.limit) + EXTRA_BYTES)


def row_of(case: Case) -> dict[str, Any]:
    """What a case is."""
    return {"family": case.family, "precision": case.precision, "limit": case.limit}


def run_case(case: Case, deadline: float, survival_seconds: float) -> dict[str, Any]:
    """Search, judge, and compare the memory model with the measurement."""
    found = case.find(deadline)
    row = row_of(case)
    if "error" in found:
        return row | {"verdict": f"failed: {found['error']}"}
    answer, budget_bytes = found["batch_size"], found["budget_bytes"]
    probes = found["probes"]
    row |= {
        "versions": found["versions"],
        "budget_bytes": budget_bytes,
        "batch_size": answer,
        "status": found["status"],
        "probes": [[probe["batch_size"], probe["outcome"]] for probe in probes],
        "full_size_steps": round(found["cost_full_size_steps"], 2),
        "confirmed_steps": found["confirmed_steps"],
        "seconds": round(found["seconds"], 1),
        "notes": [probe["note"] for probe in probes if probe["note"]],
        "warnings": found["warnings"],
        "memory_model": found["memory_model"],
        **prediction([Probe.from_dict(probe) for probe in probes], answer),
    }
    if found["status"] != "found":
        reason = "cut short" if found["status"] == "interrupted" else "failed"
        return row | {"verdict": f"{reason}: the search ended as {found['status']}"}
    # Where the limit is not the device itself, the judge's allocator gets what the search was
    # given before it kept headroom free; on the CPU the operating system's limit is the plain one.
    limit, limit_above = case.limit, None
    if case.device != "cpu":
        limit_above = str(budget_bytes)
        if limit != "all":
            limit = str(math.floor(budget_bytes / (1 - HEADROOM)))
    row |= case.judge(
        answer,
        TOO_LARGE,
        None if limit == "all" else limit,
        limit_above=limit_above,
        seconds=survival_seconds,
        deadline=deadline,
    )
    return row | {"verdict": verdict(row, deadline)}


if __name__ == "__main__":
    main()
