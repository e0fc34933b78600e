"""Soak: many searches in one process, on small models; nothing may pile up.

    python scripts/faults/soak.py                 # 200 searches, a few minutes

Each search runs in this very process: until the largest size allowed, into a real out-of-memory,
or into an exception of the model. After a garbage collection, the resident memory after the last
search must be within 2 % of that after the 20th, with as many open files and threads. Writes
scripts/results/soak.json.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from parts.case import RESULTS, save
from search_here import search_here
from torch import Tensor, nn

from batchfinder import TrainingSetup
from batchfinder.probing.devices.cpu import CpuDevice
from batchfinder.units import format_bytes

RESULT_FILE = RESULTS / "soak.json"
SEARCHES = 200
WARM_UP = 20
SAMPLE_EVERY = 20
MOST_GROWTH = 0.02
EXAMPLES_LIMIT = 12


class Tall(nn.Module):
    """Calls ``end`` once the batch is taller than 8."""

    def __init__(self, inner: nn.Module, end: Callable[[], object]) -> None:
        super().__init__()
        self.inner, self.end = inner, end

    def forward(self, rows: Tensor) -> Tensor:
        """The inner model's output."""
        if len(rows) > 8:
            self.end()
        output = self.inner(rows)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result


def run_out_of_memory() -> None:
    """Ask for more than the limit allows."""
    torch.empty(2**44, dtype=torch.uint8)


def raise_an_error() -> None:
    """As a bug in the model would."""
    raise ValueError("no such width")


ENDS: dict[str, Callable[[], object]] = {
    "largest size": lambda: None,
    "out of memory": run_out_of_memory,
    "error": raise_an_error,
}


def models() -> list[tuple[nn.Module, Tensor]]:
    """Small models of several kinds, each with a sample."""
    return [
        (nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 8)), torch.randn(2, 64)),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(1568, 8)),
            torch.randn(2, 3, 16, 16),
        ),
        (nn.LSTM(16, 32, batch_first=True), torch.randn(2, 10, 16)),
        (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.randn(2, 10, 32)),
    ]


def search(number: int) -> str:
    """The search of a number; says how it ended. Every combination comes within the first 12."""
    kinds = models()
    model, sample = kinds[number % len(kinds)]
    end = list(ENDS)[number % len(ENDS)]
    with contextlib.suppress(ValueError):
        setup = TrainingSetup(
            Tall(model, ENDS[end]),
            sample,
            loss_fn=lambda output, batch: output.mean(),
            optimizer=("adamw", "sgd", "adam")[number // 2 % 3],
        )
        # Not every CPU has an LSTM in bf16.
        precision = "bf16" if number // 6 % 2 and not isinstance(model, nn.LSTM) else "fp32"
        result = search_here(setup, EXAMPLES_LIMIT, precision=precision)
        return f"{result.status.value} {result.batch_size}"
    return "error of the model"


def readings() -> dict[str, int]:
    """What the process holds, after a garbage collection."""
    gc.collect()
    CpuDevice().release_cache()
    status = Path("/proc/self/status").read_text().splitlines()
    (resident,) = (int(line.split()[1]) for line in status if line.startswith("VmRSS:"))
    return {
        "resident_bytes": resident * 1024,
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "system_threads": len(list(Path("/proc/self/task").iterdir())),
    }


def main() -> None:
    """Run the searches, compare the readings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--searches", type=int, default=SEARCHES)
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    options = parser.parse_args()
    torch.manual_seed(0)
    samples: dict[int, dict[str, int]] = {}
    endings: dict[str, int] = {}
    started = time.monotonic()
    for number in range(1, options.searches + 1):
        ending = search(number)
        endings[ending] = endings.get(ending, 0) + 1
        if number % SAMPLE_EVERY == 0 or number == options.searches:
            samples[number] = readings()
            print(f"{number}: {samples[number]}", file=sys.stderr, flush=True)
    first, last = samples[WARM_UP], samples[options.searches]
    growth = last["resident_bytes"] / first["resident_bytes"] - 1
    grown = [name for name in ("files", "threads", "system_threads") if last[name] > first[name]]
    results: dict[str, Any] = {
        "searches": options.searches,
        "seconds": round(time.monotonic() - started, 1),
        "endings": endings,
        "samples": samples,
        "resident_growth": round(growth, 5),
        "grown": grown,
        "passed": growth <= MOST_GROWTH and not grown,
        "torch": torch.__version__,
    }
    save(options.output, results)
    print(
        f"{options.searches} searches in {results['seconds']} s: resident memory "
        f"{format_bytes(first['resident_bytes'])} after {WARM_UP}, "
        f"{format_bytes(last['resident_bytes'])} after the last ({growth:+.2%}), "
        f"grown in number: {', '.join(grown) or 'nothing'}"
    )
    if not results["passed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
