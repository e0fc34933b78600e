"""Benchmark of `compare` and `sweep`: time, and estimates against PyTorch's own CUDA allocator.

    CUDA_VISIBLE_DEVICES= python scripts/benchmarks/bench_studies.py time
    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_studies.py winners
    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_studies.py sweep
    python scripts/benchmarks/bench_studies.py knee

`time`: CPU seconds of a whole comparison without a GPU, imports included. `winners`: the strategy
with the largest estimated batch against that of a search with each strategy, and the estimated peak
of each step against the counted one. `sweep`: probes for eight lengths, and each answer against a
search of its own. `knee`: on the CPU, the rate at the smallest size that `find --throughput` calls
as fast, among the rates of a sweep over twelve sizes. A shared machine computes up to 30 % faster
or slower for seconds at a time, so the sweep times all sizes in rounds. Each model has a process of
its own, and its row is written as it comes to scripts/results/studies.json, or to `--output`.
Models of Transformers and timm need these packages.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import gpu_models  # noqa: E402
import train_gpt  # noqa: E402
import train_lstm  # noqa: E402
import train_mlp  # noqa: E402
import train_resnet  # noqa: E402
import train_vit  # noqa: E402

from batchfinder import (  # noqa: E402
    compare_strategies,
    estimate_peak_memory,
    find_gpu,
    find_max_batch,
    sweep_max_batch,
)
from batchfinder.probing.options import ProbeOptions  # noqa: E402
from batchfinder.results.throughput import AS_FAST, throughput_of  # noqa: E402
from batchfinder.studies.apply_strategy import applied  # noqa: E402
from batchfinder.studies.strategies import parse_strategy  # noqa: E402
from batchfinder.training.complete_setup import completed  # noqa: E402
from batchfinder.training.sample import BatchMaker  # noqa: E402
from batchfinder.training.setup import TrainingSetup  # noqa: E402
from batchfinder.training.step import TrainingStep  # noqa: E402

IMPORTING_SECONDS = time.process_time()

RESULT_FILE = ROOT / "results" / "studies.json"
LIMIT = "4GiB"

# Strategies whose largest batches differ by less are alike: a search on CUDA ends as close.
ALIKE = 0.99
STRATEGIES = (
    "bf16", "checkpointing", "selective-checkpointing", "sgd", "bf16+checkpointing",
    "bf16+checkpointing+sgd",
)  # fmt: skip
LENGTHS = (32, 64, 96, 128, 192, 256, 384, 512)
SIDES = (32, 48, 64, 80, 96, 112, 128, 160)

# Of a sweep on the CPU: the memory of the search, the sizes, the ratio of two, and the rounds.
CPU_LIMIT = "1GiB"
SIZES, RATIO, ROUNDS = 12, 2**0.5, 12
BUNDLED = {
    "mlp": train_mlp,
    "resnet": train_resnet,
    "vit": train_vit,
    "gpt": train_gpt,
    "lstm": train_lstm,
}

Built = tuple[Any, Any]


def _bundled(module: Any, sample: dict[str, int], **model: int) -> Callable[[], Built]:
    return lambda: (module.build_model(**model), module.build_sample(**sample))


MODELS: dict[str, Callable[[], Built]] = {
    "mlp": _bundled(train_mlp, {"points": 2048}, width=512),
    "resnet": _bundled(train_resnet, {"image_size": 224}, width=32),
    "vit": _bundled(train_vit, {"image_size": 64}, width=192, depth=6, image_size=64),
    "gpt": _bundled(train_gpt, {"max_tokens": 128}, width=192, depth=6, max_tokens=128),
    "lstm": gpu_models.lstm,
    "unet": gpu_models.unet,
    "gpt2": gpu_models.gpt2,
    "bert_base": gpu_models.bert_base,
    "resnet50": gpu_models.resnet50,
    "vit_base": gpu_models.vit_base,
}


def main() -> None:
    """Run one part for the models asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["time", "winners", "sweep", "knee"])
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    rows = results.setdefault(options.part, {})
    chosen = {
        "time": ["resnet50", "gpt2"],
        "winners": [*MODELS],
        "sweep": ["gpt", "vit"],
        "knee": [*BUNDLED],
    }
    for name in options.model or chosen[options.part]:
        # What one model leaves in a process would count against the limit of the next.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
            rows[name] = processes.submit(row_of, options.part, name).result()
        results.setdefault("torch", {})[options.part] = torch.__version__
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
    print(summary(options.part, [*rows.values()]))


def row_of(part: str, name: str) -> dict[str, Any]:
    """Run one part for one model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {"time": timed, "winners": judged, "sweep": swept, "knee": knee_of}[part](name)


def timed(name: str) -> dict[str, Any]:
    """Compare the usual strategies on paper."""
    model, sample = MODELS[name]()
    started = time.process_time()
    comparison = compare_strategies(model, sample, gpu="rtx3090")
    seconds = IMPORTING_SECONDS + time.process_time() - started
    sizes = {row.strategy.name: row.batch_size for row in comparison.rows}
    return {"cpu_seconds": round(seconds, 1), "strategies": len(sizes), "sizes": sizes}


def judged(name: str) -> dict[str, Any]:
    """Estimate each strategy, and search with it under the same budget."""
    torch.backends.cudnn.enabled = False  # the counting runtime has none
    model, sample = MODELS[name]()
    measured = compare_strategies(
        model, sample, measure=True, memory_limit=LIMIT, strategies=STRATEGIES
    )
    gpu = dataclasses.replace(find_gpu("h200"), total_bytes=measured.budget_bytes, overhead_bytes=0)
    estimated = compare_strategies(model, sample, gpu=gpu, headroom=0, strategies=STRATEGIES)
    sizes = {
        row.strategy.name: {
            "measured": row.batch_size,
            "estimated": other.batch_size,
            "note": row.note,
        }
        for row, other in zip(measured.rows, estimated.rows, strict=True)
    }
    for row in measured.rows:
        if row.batch_size:
            sizes[row.strategy.name]["peak_error"] = _peak_error(model, sample, row, gpu)
    best = [one.largest.strategy.name if one.largest else None for one in (measured, estimated)]
    chosen = sizes[str(best[1])]["measured"] if best[1] else 0
    most = max(row.batch_size for row in measured.rows)
    return {
        "largest_measured": best[0],
        "largest_estimated": best[1],
        "share_of_largest": round(chosen / most, 4) if most else 0.0,
        "sizes": sizes,
    }


def _peak_error(model: Any, sample: Any, row: Any, gpu: Any) -> float | None:
    """Return the error of the estimated peak of tensors at the measured answer."""
    at_answer = [p for p in row.result.probes if p.fits and p.batch_size == row.batch_size]
    counted = max((p.peak_allocated_bytes or 0 for p in at_answer), default=0)
    strategy = parse_strategy(row.strategy.name)
    with applied(strategy, TrainingSetup(model, sample), ProbeOptions()) as step:
        peak = estimate_peak_memory(
            step.setup, batch_size=row.batch_size, gpu=gpu, precision=step.options.precision
        )
    return round(peak.peak_allocated_bytes / counted - 1, 5) if counted else None


def swept(name: str) -> dict[str, Any]:
    """Sweep eight example sizes, and search at each."""

    def build(size: int) -> Built:
        if name == "gpt":
            made = _bundled(train_gpt, {"max_tokens": size}, width=128, max_tokens=size)
        else:
            made = _bundled(train_vit, {"image_size": size}, image_size=size)
        return made()

    values = LENGTHS if name == "gpt" else SIDES
    sweep = sweep_max_batch(build, {"size": values}, memory_limit=LIMIT)
    alone = {size: find_max_batch(*build(size), memory_limit=LIMIT) for size in values}
    found = {row.values["size"]: row.batch_size for row in sweep.rows}
    return {
        "probes": sweep.number_of_probes,
        "probes_of_searches": sum(len(result.probes) for result in alone.values()),
        "max_tokens": sweep.max_tokens,
        "sizes": {size: [found[size], alone[size].batch_size] for size in values},
        "worst_share": round(min(found[n] / alone[n].batch_size for n in values), 4),
        "are_confirmed": all(row.confirmed_steps >= 3 for row in sweep.rows),
    }


def knee_of(name: str) -> dict[str, Any]:
    """Search with throughput, and time steps at more sizes in rounds, without any search."""
    time.perf_counter = time.process_time  # also in the search's workers, which are forks
    model, sample = BUNDLED[name].build_model(), BUNDLED[name].build_sample()
    result = find_max_batch(model, sample, device="cpu", memory_limit=CPU_LIMIT, throughput=True)
    found = result.throughput
    assert found is not None
    sizes = {max(1, round(result.batch_size / RATIO**place)) for place in range(SIZES)}
    setup, _ = completed(TrainingSetup(model, sample))
    step = TrainingStep(setup, torch.device("cpu"))
    batches = BatchMaker(setup.sample)

    def timed_step(size: int) -> float:
        batch = batches.make(size)
        started = time.perf_counter()
        for micro_batch in step.fetch(lambda: batch):
            step.forward_backward(micro_batch)
        step.optimizer_step()
        return time.perf_counter() - started

    places = sorted({*sizes, found.knee})
    rounds: list[dict[int, list[float]]] = []
    for _ in range(ROUNDS + 1):
        rounds.append({size: [timed_step(size)] for size in places})
        places.reverse()
    sweep = throughput_of(rounds[1:])  # the first round allocates memory
    rates = {rate.batch_size: round(rate.samples_per_second, 1) for rate in sweep.rates}
    share, error = rates[found.knee] / max(rates.values()), sweep.rates[0].error
    return {
        "batch_size": result.batch_size,
        "knee": found.knee,
        "knee_from": found.knee_from,
        "knee_to": found.knee_to,
        "is_clear": found.is_clear,
        "knee_of_sweep": sweep.knee,
        "sweep_from": sweep.knee_from,
        "sweep_to": sweep.knee_to,
        "share_of_best": round(share, 4),
        "error": round(error, 4),
        "is_as_fast": share >= 1 - AS_FAST - error,
        "rates": {rate.batch_size: round(rate.samples_per_second, 1) for rate in found.rates},
        "rates_of_sweep": rates,
    }


def summary(part: str, rows: list[dict[str, Any]]) -> str:
    """Return the last line."""
    if part == "time":
        most = max(row["cpu_seconds"] for row in rows)
        return f"studies: at most {most} CPU seconds for {rows[0]['strategies']} strategies"
    if part == "winners":
        errors = [
            abs(of_one["peak_error"])
            for row in rows
            for name, of_one in row["sizes"].items()
            if of_one.get("peak_error") is not None and "checkpointing" in name
        ]
        right = sum(row["share_of_largest"] >= ALIKE for row in rows)
        worst = f"{max(errors, default=0):.1%}"
        return (
            f"studies: winner right in {right} of {len(rows)}, checkpointing's peak within {worst}"
        )
    if part == "knee":
        right = sum(row["is_as_fast"] for row in rows)
        least = min(row["share_of_best"] for row in rows)
        wrong = sum(row["is_clear"] and not row["is_as_fast"] for row in rows)
        return (
            f"studies: {right} of {len(rows)} knees as fast as the best size, the least "
            f"{least:.1%}; {wrong} clear and wrong"
        )
    probes = max(row["probes"] for row in rows)
    worst = min(row["worst_share"] for row in rows)
    return f"studies: at most {probes} probes a sweep, answers at least {worst:.1%} of a search's"


if __name__ == "__main__":
    main()
