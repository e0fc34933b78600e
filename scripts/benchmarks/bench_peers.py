r"""Benchmark against other batch-size finders, on the same models under the same real limit.

    python scripts/benchmarks/bench_peers.py  # hours on 2 cores
    python scripts/benchmarks/bench_peers.py --family mlp --limit 1GiB --steps 10 --repeats 2
    GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1 \
        python scripts/benchmarks/bench_peers.py --limit 1GiB \
        --output scripts/results/peers_mapped.json
    python scripts/benchmarks/bench_peers.py --device cuda:0  # models of gpu_models.py
    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_peers.py --device cuda:0 \
        --repeats 1 --output scripts/results/peers_counted.json

Every finder runs in a fresh process, under the same limit: RLIMIT_DATA on the CPU; on CUDA the
limit of PyTorch's allocator, less what a process takes beside it. The true maximum is found
with the judge, ``train_at.py``, where the results do not have it yet: since the heap differs from
run to run it is an interval, from the largest size of which every one of several fresh runs
survived all its steps, to the smallest of which none did. Ours runs twice: with all of the limit,
as the others do, and with the 5 % headroom that it keeps free by default; on CUDA once more from
the estimate, as it does by itself where full-size steps should take a second. Needs ``pip install
-r scripts/benchmarks/parts/peers_constraints.txt``. Writes each row as it comes to
scripts/results/peers.json.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parts.case import (
    RESULTS,
    Case,
    describe_device,
    markdown_table,
    run_for_json,
    save,
    survived,
)
from peer_tables import peers

from batchfinder.units import parse_bytes

RESULT_FILE = RESULTS / "peers.json"
CONSTRAINTS = Path(__file__).parent / "parts" / "peers_constraints.txt"
FAMILIES = ("mlp", "resnet", "vit", "gpt", "lstm", "unet")
GPU_FAMILIES = ("resnet50", "vit_base", "gpt2", "bert_base", "lstm", "unet")
LIMITS = ("1GiB", "2GiB", "4GiB")
GPU_LIMITS = ("8GiB", "24GiB", "80GiB")
FROM_ESTIMATE = "--start-from-estimate"
OURS = {
    "batchfinder": ("--headroom", "0"),
    "batchfinder, 5% headroom": (),
    "batchfinder, from estimate": ("--headroom", "0", FROM_ESTIMATE),
}
PEERS = (
    *("doubling_and_bisection", "lightning_power", "lightning_binsearch"),
    *("accelerate", "toma", "torch_max_mem"),
)


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=sorted({*FAMILIES, *GPU_FAMILIES}), action="append")
    parser.add_argument("--limit", action="append", help="such as 1GiB")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--contender", choices=(*OURS, *PEERS), action="append")
    parser.add_argument("--steps", type=int, default=50, help="that a size has to survive")
    parser.add_argument("--repeats", type=int, default=3, help="fresh runs that decide on a size")
    parser.add_argument("--resolution", type=float, default=0.01, help="of the true maximum")
    parser.add_argument("--seconds", type=float, default=1800, help="a finder may take so long")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    options = parser.parse_args()
    results: dict[str, Any] = {"cases": {}}
    if options.output.exists():
        results = json.loads(options.output.read_text())
    results["versions"] = versions()
    results["glibc_tunables"] = os.environ.get("GLIBC_TUNABLES", "")
    on_cpu = options.device == "cpu"
    usual = [name for name, flags in OURS.items() if not (on_cpu and FROM_ESTIMATE in flags)]
    contenders = options.contender or (*usual, *PEERS)
    device = describe_device(options.device)
    results["device"] = device.name
    for limit in options.limit or (LIMITS if on_cpu else GPU_LIMITS):
        for family in options.family or (FAMILIES if on_cpu else GPU_FAMILIES):
            file = f"train_{family}.py:build_model" if on_cpu else f"gpu_models.py:{family}"
            case = Case(family, f"scripts/examples/{file}", limit, options.device)
            # The finder counts what the process takes beside the allocator, as people do.
            allowed = str(parse_bytes(limit) - device.context_bytes)
            row = results["cases"].setdefault(f"{family} {limit}", {"finders": {}})
            judge = Judge(case, allowed, options.steps, options.repeats)
            is_judged = (row.get("steps"), row.get("repeats")) == (options.steps, options.repeats)
            if is_judged:
                judge.runs = {int(size): runs for size, runs in row["judged"].items()}
                judge.flushes = {
                    int(size): count for size, count in row.get("cache_flushes", {}).items()
                }
            for contender in contenders:
                row["finders"][contender] = found = find(case, contender, allowed, options.seconds)
                print(f"{case.name}, {contender}: {found}", file=sys.stderr, flush=True)
                save(options.output, results)
            if not is_judged:
                answers = [found["batch_size"] for found in row["finders"].values()]
                maximum = judge.maximum(max([1, *answers]), options.resolution)
                row |= {"maximum": maximum, "steps": options.steps, "repeats": options.repeats}
            low = row["maximum"][0]
            for found in row["finders"].values():
                if answer := found["batch_size"]:
                    found["survived"] = judge.fits(answer)
                    found["of_maximum"] = round(answer / low, 3) if low else None
                    found["full_size_steps"] = round(found["samples"] / answer, 1)
            row["judged"] = dict(sorted(judge.runs.items()))
            row["cache_flushes"] = {size: n for size, n in sorted(judge.flushes.items()) if n}
            save(options.output, results)
            print(table(family, limit, row), flush=True)
    print(peers(results["cases"], "time"), peers(results["cases"], "steps"), sep="\n\n")


def versions() -> dict[str, str]:
    """Of the packages in the constraints file, and of ours."""
    lines = CONSTRAINTS.read_text().splitlines()
    names = [line.partition("==")[0] for line in lines if "==" in line]
    for name in names:  # what is installed wrongly here is no failure of theirs
        importlib.import_module(name.replace("-", "_"))
    return {name: importlib.metadata.version(name) for name in names}


def find(case: Case, contender: str, allowed: str, seconds: float) -> dict[str, Any]:
    """What a finder answers, and what it took.

    Args:
        case: what is trained, and the limit for ours.
        contender: which finder.
        allowed: the limit that the others run under.
        seconds: they are stopped after so long.
    """
    if contender in OURS:
        report = case.find(options=OURS[contender])
        probes = report.get("probes", [])
        return {
            "batch_size": report.get("batch_size", 0),
            "status": report.get("status", "error"),
            "error": report.get("error", ""),
            "steps": sum(probe["steps"] for probe in probes),
            "samples": sum(probe["samples"] for probe in probes),
            "wall_seconds": report["wall_seconds"],
        }
    command = ["-m", "parts.peers", contender, case.target, allowed, "--device", case.device]
    report = run_for_json(command, time.monotonic() + seconds)
    # Killed, or out of time: it has said nothing.
    return {"batch_size": 0, "steps": 0, "samples": 0} | report


class Judge:
    """Says of sizes whether they train, by fresh runs of which each verdict is kept.

    Args:
        case: what is trained.
        limit: on the memory of each run.
        steps: that a run has to survive.
        repeats: the runs of a size.
    """

    def __init__(self, case: Case, limit: str, steps: int, repeats: int) -> None:
        self.case, self.limit, self.steps, self.repeats = case, limit, steps, repeats
        self.runs: dict[int, list[bool]] = {}
        self.flushes: dict[int, int] = {}

    def survivals(self, batch_size: int) -> list[bool]:
        """How each of the runs of a size ended."""
        if batch_size not in self.runs:
            limits = {"seconds": math.inf, "deadline": math.inf}
            reports = [
                self.case.train(batch_size, self.limit, steps=self.steps, **limits)
                for _ in range(self.repeats)
            ]
            self.runs[batch_size] = [survived(report) for report in reports]
            flushes = [report.get("cache_flushes", 0) for report in reports]
            self.flushes[batch_size] = max(flushes, default=0)
        return self.runs[batch_size]

    def fits(self, batch_size: int) -> bool:
        """Whether all its runs survived."""
        return all(self.survivals(batch_size))

    def maximum(self, guess: int, resolution: float) -> tuple[int, int]:
        """The largest size of which all runs survived, the smallest of which none did.

        Args:
            guess: a size to begin from.
            resolution: the share of the size that may lie between those looked at.
        """
        low, _ = self._edge(guess, resolution, self.fits)
        _, high = self._edge(max(low, 1), resolution, lambda size: any(self.survivals(size)))
        return low, high

    def _edge(self, guess: int, resolution: float, holds: Callable[[int], bool]) -> tuple[int, int]:
        """Two sizes close to each other, of which something holds of the first alone."""
        low, high = guess, guess
        if holds(guess):
            while holds(high := max(high + 1, int(high * 1.1))):
                low = high
        else:
            while low >= 1 and not holds(low := int(low * 0.9)):
                high = low
        while high - low > max(1, int(low * resolution)):
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low, high


def table(family: str, limit: str, row: dict[str, Any]) -> str:
    """The table of one model under one limit."""
    header = ["finder", "answer", "of the maximum", "survives", "steps", "full-size steps", "time"]
    lines = []
    for name, found in row["finders"].items():
        answer = found["batch_size"]
        cells: list[object] = [name, answer or found.get("error", "nothing")]
        if answer:
            cells += [share_of_maximum(found)]
            cells += ["yes" if found["survived"] else "**no**"]
            cells += [found["steps"], found["full_size_steps"]]
        else:
            cells += ["-", "-", found["steps"], "-"]
        lines.append([*cells, f"{found['wall_seconds']:.0f} s"])
    low, high = row["maximum"]
    return f"{family}, {limit}, true maximum {low} to {high}\n\n" + markdown_table(header, lines)


def share_of_maximum(found: dict[str, Any]) -> str:
    """As a percentage; "-" if unknown, as after a run that was stopped before it was judged."""
    share = found.get("of_maximum")
    return f"{share:.0%}" if share else "-"


if __name__ == "__main__":
    main()
