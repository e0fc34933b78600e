#!/usr/bin/env python3
r"""How well the simulated GPU agrees with results that others published for timm models.

    python scripts/benchmarks/bench_estimate.py TABLE.csv \
        [--limit N --seed S] [--json FILE]

Reads a table of either shape: (model, img_size, layout, fits, fails) of the timm project, or
(model, batch_size, peak_device_mib) of the GPUMemNet project. Prints the misses; the last line is
the result. All of the first table takes about 20 minutes of one core.

Needs timm; where PyTorch has no CUDA, torchvision's operators must be declared first, see
--before MODULE.py.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from parts.timm_recipes import A100, RTX_3090, Recipe, TracedModel, trace_model

from batchfinder.probing.devices.allocator.caching import CachingAllocator
from batchfinder.simulation.gpus import find_gpu
from batchfinder.simulation.largest import largest_that_fits
from batchfinder.simulation.replay import replay
from batchfinder.units import MIB

SMALLEST_PEAK_MIB = 4096
SAME_MODEL = 0.01  # of the number of parameters: beyond it, timm has changed the model since
MISS = 0.08  # of a peak; what is further off is printed


def main() -> None:
    """Read the table, simulate its rows, print what was found."""
    arguments = _parse_arguments()
    torch.set_num_threads(1)
    _run_first(arguments.before)
    with arguments.table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    are_brackets = "fits" in rows[0]
    if are_brackets:
        rows = [row for row in rows if row["fits"] and row["fails"]]
    else:
        rows = [row for row in rows if float(row["peak_device_mib"]) >= SMALLEST_PEAK_MIB]
    if arguments.limit:
        rows = _sample(rows, arguments.limit, arguments.seed, by_model=not are_brackets)
    traces = Traces(RTX_3090 if are_brackets else A100)
    summary = (check_brackets if are_brackets else check_peaks)(rows, traces)
    summary |= {"rows": len(rows), "limit": arguments.limit, "seed": arguments.seed}
    summary["without_trace"] = sorted(traces.missing)
    if traces.seconds:
        summary["longest_trace_seconds"] = max(traces.seconds.values())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(summary, indent=1) + "\n")
    print(summary["line"])


class Traces:
    """The trace of each model.

    Attributes:
        seconds: the time of each trace on one core, by the model's name.
        missing: the models that could not be traced.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.seconds: dict[str, float] = {}
        self.missing: list[str] = []
        self._recipe = recipe
        self._last: tuple[str, TracedModel | None] = ("", None)

    def get(self, name: str, image_size: int | None, layout: str) -> TracedModel | None:
        """None if this version of timm has no such model, or the two traces do not align."""
        key = f"{name}_{image_size}_{layout}"
        if self._last[0] != key:
            self._last = (key, self._make(key, name, image_size, layout))
        return self._last[1]

    def _make(self, key: str, name: str, image_size: int | None, layout: str) -> TracedModel | None:
        started = time.process_time()
        try:
            return trace_model(name, image_size, layout, self._recipe)
        except Exception as error:  # noqa: BLE001 - any of hundreds of models may fail its own way
            print(f"no trace of {key}: {type(error).__name__}: {str(error)[:200]!r}", flush=True)
            self.missing.append(key)
            return None
        finally:
            self.seconds[key] = round(time.process_time() - started, 2)


def check_brackets(rows: list[dict[str, str]], traces: Traces) -> dict[str, Any]:
    """Is the largest simulated batch size between the one that ran and the one that did not?"""
    gpu = find_gpu("RTX 3090", cuda=(11, 3))
    capacity = gpu.total_bytes - gpu.overhead_bytes
    inside = over = under = 0
    misses, others = [], []
    for row in rows:
        traced = traces.get(row["model"], int(row["img_size"]), row["layout"])
        if traced is None:
            continue
        if not _is_same_model(row, traced.parameters):
            print(f"another model today: {row['model']} had {row['params_millions']} million "
                  "parameters", flush=True)  # fmt: skip
            others.append(row["model"])
            continue
        fits, fails = int(row["fits"]), int(row["fails"])
        found = largest_that_fits(
            lambda size, trace=traced.trace: (
                replay(trace, size, CachingAllocator(capacity), gpu).room
            ),
            traced.trace.upper_bound(capacity),
        )
        if fits <= found < fails:
            inside += 1
            continue
        over, under = over + (found >= fails), under + (found < fits)
        # The nearest answer that would have been right.
        edge = fits if found < fits else fails - 1
        misses.append((round(found / edge - 1, 3), row["model"], row["layout"]))
        print(f"{found / edge - 1:+.1%} {row['model']} {row['layout']}: "
              f"{found}, runs at {fits}, fails at {fails}", flush=True)  # fmt: skip
    number = inside + over + under
    line = f"brackets: inside {inside}/{number} ({inside / number:.1%}), over {over}, under {under}"
    return {"line": line, "misses": sorted(misses), "other_models_today": sorted(set(others))}


def _is_same_model(row: dict[str, str], parameters: int) -> bool:
    """Whether this version of timm builds what the row was measured on."""
    return abs(parameters / 1e6 / float(row["params_millions"]) - 1) <= SAME_MODEL


def check_peaks(rows: list[dict[str, str]], traces: Traces) -> dict[str, Any]:
    """How far is the simulated peak of the whole device from the one measured?"""
    gpu = find_gpu("A100 40GB")
    errors = []
    for row in sorted(rows, key=lambda row: row["model"]):
        traced = traces.get(row["model"], None, "nchw")
        if traced is None:
            continue
        batch_size, measured = int(row["batch_size"]), float(row["peak_device_mib"])
        allocator = CachingAllocator(gpu.total_bytes - gpu.overhead_bytes)
        run = replay(traced.trace, batch_size, allocator, gpu)
        simulated = (run.peak_reserved_bytes + gpu.overhead_bytes) / MIB
        errors.append((round(simulated / measured - 1, 4), row["model"], batch_size))
        if abs(errors[-1][0]) > MISS:
            print(f"{errors[-1][0]:+.1%} {row['model']} at {batch_size}: "
                  f"{simulated:.0f} MiB, measured {measured:.0f} MiB", flush=True)  # fmt: skip
    sizes = sorted(abs(error[0]) for error in errors)
    p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    line = f"peaks: median {statistics.median(sizes):.1%}, p90 {p90:.1%}, n {len(sizes)}"
    return {"line": line, "misses": sorted(error for error in errors if abs(error[0]) > MISS)}


def _sample(
    rows: list[dict[str, str]], limit: int, seed: int, *, by_model: bool
) -> list[dict[str, str]]:
    """Rows drawn by chance; or all rows of models drawn by chance, which share one trace each."""
    drawn = sorted({row["model"] for row in rows}) if by_model else [*rows]
    random.Random(seed).shuffle(drawn)
    if by_model:
        drawn = [row for model in drawn for row in rows if row["model"] == model]
    return drawn[:limit]


def _run_first(path: Path | None) -> None:
    if path is not None:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # what it declares ends with it
        spec.loader.exec_module(module)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument(
        "--limit", type=int, help="that many rows, drawn by chance (of peaks: model by model)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--before", type=Path, help="a Python file to run before timm is imported")
    return parser.parse_args()


if __name__ == "__main__":
    main()
