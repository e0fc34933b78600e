#!/usr/bin/env python3
"""How well fine-tuning of language models is estimated, against figures that others measured.

    python scripts/benchmarks/bench_llm.py TABLE.csv [--source TEXT] [--adapters FOLDER] [--again]

TABLE.csv has a row per measured peak: model, method, lora_r, lora_targets, quant, batch, seq,
precision, checkpointing, attention, optimizer, gpu, metric, gib, kind, stack, source, note. Each
measured row is built as ``batchfinder estimate hf:...`` builds it, and its step is simulated at its
batch size. Figures of the allocator are compared with the simulated allocator; those of a process
or device also with the overhead of the GPU. A row that cannot be estimated is kept with the reason.
FOLDER is ``method_comparison/MetaMathQA/experiments`` of a checkout of PEFT, with the settings of
the adapters.

Two others stand beside it on the same rows: a formula (weights, gradients and states, the
activations of Korthikanti et al., 34 bytes a token, layer and hidden unit, 2 with checkpointing,
and the logits), and what ``accelerate estimate-memory`` prints, where accelerate is installed: its
training peak if all weights are trained, else the total size of the weights in their dtype.

scripts/results/llm.json is written after each row. Run again, it goes on with the rows it lacks;
--again starts anew. Needs transformers, peft and bitsandbytes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from transformers.integrations import sdpa_attention

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from llm.published import (  # noqa: E402 - runs from a checkout too
    config_of,
    gpu_of,
    key_of,
    kind_of,
    options_of,
    plain_model,
    setup_of,
)

from batchfinder.errors import BatchFinderError  # noqa: E402
from batchfinder.probing.options import ProbeOptions  # noqa: E402
from batchfinder.simulation.prober import SimulatedProber  # noqa: E402
from batchfinder.simulation.tracing.step_trace import StepTraces  # noqa: E402
from batchfinder.training.state.patching import replaced  # noqa: E402
from batchfinder.units import GIB  # noqa: E402

Row = Mapping[str, str]
RESULT = ROOT / "scripts" / "results" / "llm.json"
_MEASUREMENT = {"gib", "as_published", "metric", "kind", "stack", "source"}
SHOWN = ("model", "method", "batch", "seq", "quant", "attention", "gpu", "metric", "source", "note")


def simulate(row: Row, adapters: Path | None, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the simulated bytes of a row's step, and those of the other estimators.

    Rows that differ in the measurement alone, as two releases of PyTorch, are simulated once.

    Raises:
        BatchFinderError: the row cannot be estimated.
    """
    gpu = gpu_of(row)
    is_old = "transformers 4." in row["stack"]
    what = json.dumps([is_old, *(row[name] for name in row if name not in _MEASUREMENT)])
    if what in known:
        return known[what]
    setup = setup_of(row, adapters)
    probe_options = ProbeOptions(headroom=0.0)
    traces = StepTraces(setup, probe_options, gpu.compute_capability)
    traces.are_general = False  # one size is asked for
    roomy = dataclasses.replace(gpu, total_bytes=1 << 50)
    # With a mask, as for prefix tuning, transformers itself expands keys and values.
    usual = sdpa_attention.use_gqa_in_sdpa
    rule = (lambda *_: False) if "K/V expanded" in row["attention"] else usual
    with replaced(sdpa_attention, use_gqa_in_sdpa=rule):
        run = SimulatedProber(traces, roomy, probe_options).replay(int(row["batch"]))
    known[what] = {
        "allocated": run.peak_allocated_bytes,
        "reserved": run.peak_reserved_bytes,
        "process": run.peak_reserved_bytes + gpu.overhead_bytes,
        "total": gpu.total_bytes,
        "formula": formula(row, setup),
        "accelerate": accelerate_bytes(row),
    }
    return known[what]


def formula(row: Row, setup: Any) -> float:
    """Return bytes by the textbook: weights, gradients, states, activations, logits."""
    parameters = [*setup.model.parameters()]
    weights = sum(p.numel() * p.element_size() for p in parameters)
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    known, options = setup.model.config, options_of(row)
    tokens = int(row["batch"]) * options["seq"]
    a_unit = 2 if options["checkpointing"] else 34
    layers = known.hidden_size * known.num_hidden_layers
    return float(weights + 3 * trained + tokens * (layers * a_unit + known.vocab_size * 8))


def accelerate_bytes(row: Row) -> float | None:
    """Return what ``accelerate estimate-memory`` prints; None where it is not installed."""
    try:
        from accelerate.commands.estimate import estimate_training_usage
    except ImportError:
        return None
    total = _fp32_bytes(json.dumps(config_of(row)))
    if row["method"] == "full":
        dtype = "float32" if "fp32" in row["precision"] else "float16"
        return float(max(estimate_training_usage(total, dtype).values()))
    return total / (8 if row["quant"] else 2)


@cache
def _fp32_bytes(config: str) -> int:
    from accelerate.utils import calculate_maximum_sizes

    return int(calculate_maximum_sizes(plain_model(config))[0])


def judged(row: Row, adapters: Path | None, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return one row of the result: the figures, or the reason why there is none."""
    done: dict[str, Any] = {"key": key_of(row), **{name: row[name] for name in SHOWN}}
    done["kind"] = kind = kind_of(row)
    started = time.process_time()
    try:
        if kind != "out of memory":
            done["measured_gib"] = float(row["gib"])
        sizes = simulate(row, adapters, known)
    except BatchFinderError as error:
        return {**done, "reason": str(error).partition("\n")[0]}
    except Exception as error:  # noqa: BLE001 - a row of a file that nobody has seen must not end the run
        return {**done, "reason": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    own = "reserved" if "reserved" in row["metric"] else kind
    done["batchfinder_gib"] = round(sizes["process" if kind == "out of memory" else own] / GIB, 4)
    for name in ("formula", "accelerate"):
        if sizes[name] is not None:
            done[f"{name}_gib"] = round(sizes[name] / GIB, 4)
    if kind == "out of memory":
        done["is_right"] = sizes["process"] > sizes["total"]
    done["seconds"] = round(time.process_time() - started, 1)
    return done


def error_of(row: Mapping[str, Any], name: str = "batchfinder") -> float | None:
    """Return how far an estimate is above the measured figure, as a share of it."""
    if "measured_gib" not in row or f"{name}_gib" not in row:
        return None
    return float(row[f"{name}_gib"] / row["measured_gib"] - 1)


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the last line: errors of allocated memory, then of whole processes."""
    rows = [*rows]
    parts = []
    for kind in ("allocated", "process"):
        errors = _errors([row for row in rows if row["kind"] == kind])
        if errors:
            text = f"{kind} median {statistics.median(errors):.1%}, worst {max(errors):.1%}"
            parts.append(f"{text}, n {len(errors)}")
    died = [row["is_right"] for row in rows if "is_right" in row]
    if died:
        parts.append(f"out of memory {sum(died)} of {len(died)}")
    missing = sum("reason" in row for row in rows)
    return "; ".join([*parts, *([f"not estimated {missing}"] if missing else [])])


def _errors(rows: Iterable[Mapping[str, Any]], name: str = "batchfinder") -> list[float]:
    return [abs(error) for row in rows if (error := error_of(row, name)) is not None]


def source_of(row: Mapping[str, Any]) -> str:
    """Return the group of a row: its source without what differs inside it, GPU and metric."""
    words = row["source"].removeprefix("package ").split()
    return f"{words[0] if words else '?'}, {row['gpu'] or 'any GPU'}, {row['kind']}"


def groups(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return median and worst errors of every source, for every estimator."""
    by_source: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_source.setdefault(source_of(row), []).append(row)
    result: dict[str, dict[str, Any]] = {}
    for source, ones in by_source.items():
        result[source] = {"n": len(_errors(ones)), "reasons": sum("reason" in o for o in ones)}
        for name in ("batchfinder", "formula", "accelerate"):
            if errors := _errors(ones, name):
                result[source][name] = [
                    round(value, 4) for value in (statistics.median(errors), max(errors))
                ]
    return result


def write(done: Mapping[str, Mapping[str, Any]]) -> None:
    """Write all rows and their summary; a run that ends here loses nothing."""
    rows = [*done.values()]
    text = json.dumps({"sources": groups(rows), "rows": rows}, indent=1, ensure_ascii=False)
    RESULT.with_suffix(".new").write_text(text + "\n", encoding="utf-8")
    RESULT.with_suffix(".new").replace(RESULT)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--source", default="", help="only rows whose GPU or source has this text")
    parser.add_argument("--adapters", type=Path, help="settings of adapters, from PEFT's checkout")
    parser.add_argument("--again", action="store_true", help="simulate known rows again")
    arguments = parser.parse_args()
    with arguments.table.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"].startswith("measured")]
    rows = [row for row in rows if arguments.source in row["gpu"] + row["source"]]
    done: dict[str, dict[str, Any]] = {}
    with suppress(FileNotFoundError):
        done = {row["key"]: row for row in json.loads(RESULT.read_text("utf-8"))["rows"]}
    if arguments.again:
        done = {key: row for key, row in done.items() if key not in {*map(key_of, rows)}}
    if accelerate_is_missing():
        print("accelerate is not installed: accelerate estimate-memory is left out")
    known: dict[str, dict[str, Any]] = {}
    for row in rows:
        if key_of(row) not in done:
            one = done[key_of(row)] = judged(row, arguments.adapters, known)
            write(done)
            print(_line(one), flush=True)
    shown = [done[key] for key in dict.fromkeys(map(key_of, rows))]
    for source, figures in groups(shown).items():
        print(f"{source}: " + json.dumps(figures))
    print("llm:", summary(shown))


def accelerate_is_missing() -> bool:
    """Return True if accelerate cannot be imported."""
    from importlib.util import find_spec

    return find_spec("accelerate") is None


def _line(row: Mapping[str, Any]) -> str:
    label = f"{row['model'].split('/')[-1][:26]:26} {row['method'][:12]:12} b{row['batch']:>2}"
    label += f" s{row['seq'][:5]:>5} {row['attention'][:5]:5} {row['gpu']:13} {row['kind'][:9]:9}"
    if "reason" in row:
        return f"{label} not estimated: {row['reason']}"
    if "is_right" in row:
        return f"{label} out of memory {'expected' if row['is_right'] else 'not expected'}"
    errors = (f"{name} {error_of(row, name) or 0:+.1%}" for name in ("formula", "accelerate"))
    error = error_of(row)
    return f"{label} {row['measured_gib']:7.3f} GiB {error:+7.2%} {' '.join(errors)}"


if __name__ == "__main__":
    main()
