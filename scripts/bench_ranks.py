"""Benchmark of searches on several ranks: what agreeing on every probe costs.

    python scripts/bench_ranks.py                  # 1, 2 and 4 ranks on the CPU, a few minutes
    python scripts/bench_ranks.py --ranks 2 --strategy fsdp

Each run is a whole search under torchrun, the same work for every rank, in 1 GiB each. Once it
has ended, the ranks gather as they do for every probe, 200 times: what one probe spends on agreeing
is two such gatherings. Writes each run as it comes to scripts/results/ranks_cpu.json; fails if
agreeing takes more than 5 % of a probe.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from batchfinder.finder import run_search
from batchfinder.probing.attempt import Attempt
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.ranks.meeting import open_meeting
from batchfinder.probing.ranks.prober import RankProber
from batchfinder.probing.workers.source import SetupSource
from batchfinder.units import GIB

SCRIPTS = Path(__file__).parent
RESULT_FILE = SCRIPTS / "results" / "ranks_cpu.json"
TARGET = f"{SCRIPTS}/examples/train_mlp.py:build_model"
GATHERINGS = 200
MOST_SHARE = 0.05


def main() -> None:
    """Run the searches asked for, or be one of their ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append")
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        be_a_rank(options.strategy)
        return
    known = json.loads(RESULT_FILE.read_text()) if RESULT_FILE.exists() else []
    is_cheap = True
    for ranks in options.ranks or (1, 2, 4):
        row = run(ranks, options.strategy)
        print(json.dumps(row), flush=True)
        is_cheap &= row["agreement_share"] <= MOST_SHARE
        known = [other for other in known if key(other) != key(row)] + [row]
        RESULT_FILE.write_text(json.dumps(sorted(known, key=key), indent=2) + "\n")
    if not is_cheap:
        sys.exit(f"agreeing takes more than {MOST_SHARE:.0%} of a probe")


def key(row: dict[str, Any]) -> tuple[str, int]:
    """Which run a row is of."""
    return row["strategy"], row["ranks"]


def run(ranks: int, strategy: str) -> dict[str, Any]:
    """One search, in a job of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, __file__, "--as-rank", "--strategy", strategy],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def be_a_rank(strategy: str) -> None:
    """Search, then gather; rank 0 prints what it took."""
    meeting = open_meeting()
    ranks = meeting.job.world_size
    options = ProbeOptions(device="cpu", memory_limit=ranks * GIB, strategy=strategy)
    started = time.perf_counter()
    prober = RankProber(SetupSource(TARGET), options, meeting)
    try:
        result = prober.agreed(run_search(prober))
        seconds = time.perf_counter() - started
        report = Attempt(result.probes[-1], True, True).to_dict()
        gatherings = []
        for _ in range(GATHERINGS):
            meeting.gather(None)  # so that none is late for what is timed
            begun = time.perf_counter()
            meeting.gather(report)
            gatherings.append(time.perf_counter() - begun)
        probe_seconds = mean(probe.seconds for probe in result.probes)
        row = {
            "strategy": strategy,
            "ranks": ranks,
            "batch_size": result.batch_size,
            "probes": len(result.probes),
            "search_seconds": round(seconds, 1),
            "probe_seconds": round(probe_seconds, 3),
            "agreement_seconds": round(2 * median(gatherings), 5),
            "agreement_share": round(2 * median(gatherings) / probe_seconds, 7),
            "versions": dict(result.versions),
        }
        if meeting.job.rank == 0:
            print(json.dumps(row))
        meeting.gather("all have read it")
    finally:
        prober.close()


if __name__ == "__main__":
    main()
