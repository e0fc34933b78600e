r"""Benchmark of the search: six families of models on the CPU, under real memory limits.

    python scripts/benchmarks/bench_search.py  # all, about 20 minutes on 2 cores
    python scripts/benchmarks/bench_search.py --family mlp --limit 2GiB
    python scripts/benchmarks/bench_search.py --simulated  # devices on paper; a few minutes
    GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1 \
        python scripts/benchmarks/bench_search.py --output scripts/results/search_cpu_mapped.json

Each answer must train 50 further steps in a fresh process under the same limit, and 1.2 times the
answer must not. Writes each case as it comes to scripts/results/search_cpu.json or the file given,
and ends with the table for the README.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from parts.case import RESULTS, Case, judged, save
from parts.paper_devices import simulate
from rendering import FAMILIES, searches

from batchfinder.units import parse_bytes

LIMITS = ("2GiB", "3GiB")
RESULT_FILE = RESULTS / "search_cpu.json"


def main() -> None:
    """Run the cases asked for, or the simulation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--limit", action="append", help="such as 2GiB")
    parser.add_argument("--simulated", action="store_true", help="devices on paper")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    options = parser.parse_args()
    if options.simulated:
        if not simulate():
            sys.exit(1)
        return
    # A part is run into the results of the others; without a choice everything is run anew.
    is_part = bool(options.family or options.limit)
    results = read(options.output) if is_part else {"versions": {}, "cases": []}
    results["glibc_tunables"] = os.environ.get("GLIBC_TUNABLES", "")
    for limit in options.limit or LIMITS:
        for family in options.family or FAMILIES:
            case = Case(family, f"scripts/examples/train_{family}.py:build_model", limit)
            found = case.find()
            row = judged(case, found)
            print(describe(row), file=sys.stderr, flush=True)
            others = [known for known in results["cases"] if key(known) != key(row)]
            results["cases"] = sorted([*others, row], key=key)
            results["versions"] |= found.get("versions", {})
            save(options.output, results)
    print(searches(results["cases"]))
    if not all(row["survives"] and row["is_tight"] for row in results["cases"]):
        sys.exit(1)


def read(path: Path) -> dict[str, Any]:
    """The results so far."""
    if not path.exists():
        return {"versions": {}, "cases": []}
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def key(row: dict[str, Any]) -> tuple[int, int]:
    """Which case a row is of, and its place in the table."""
    return parse_bytes(row["limit"]), list(FAMILIES).index(row["family"])


def describe(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    if "error" in row:
        return f"{row['family']} {row['limit']}: {row['error']}"
    return (
        f"{row['family']} {row['limit']}: {row['batch_size']} ({row['status']}) "
        f"from {row['probes']}, {row['full_size_steps']} full-size steps, {row['seconds']} s; "
        f"survives: {row['survives']}, tight: {row['is_tight']}"
    )


if __name__ == "__main__":
    main()
