#!/usr/bin/env python3
"""How well fine-tuning of language models is estimated, against figures that others measured.

    python scripts/benchmarks/bench_llm.py TABLE.csv [--source TEXT] [--limit N]

TABLE.csv has a row per measured peak: model, method, lora_r, lora_targets, quant, batch, seq,
precision, checkpointing, attention, optimizer, gpu, metric, gib. Each row whose model has a known
architecture here is built as `batchfinder estimate hf:...` builds it, and one step is simulated at
its batch size. Beside it stands a formula: weights, gradients and states, and the activations of
Korthikanti et al. (34 bytes a token, layer and hidden unit; 2 with checkpointing), and the logits.
Writes scripts/results/llm.json. Needs transformers, peft and bitsandbytes.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers.integrations import sdpa_attention

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from batchfinder.errors import BatchFinderError  # noqa: E402 - runs from a checkout too
from batchfinder.probing.options import ProbeOptions  # noqa: E402
from batchfinder.simulation.gpus import Gpu, find_gpu  # noqa: E402
from batchfinder.simulation.patching import replaced  # noqa: E402
from batchfinder.simulation.prober import SimulatedProber  # noqa: E402
from batchfinder.simulation.tracing.step_trace import StepTraces  # noqa: E402
from batchfinder.training.frameworks.language_model import language_model  # noqa: E402
from batchfinder.training.optimizer import find_optimizer  # noqa: E402
from batchfinder.units import GIB  # noqa: E402

# type, vocabulary, hidden, intermediate, layers, heads, key-value heads, tied, further
ARCHITECTURES: dict[str, tuple[Any, ...]] = {
    "TinyLlama-1.1B-Chat-v1.0": ("llama", 32000, 2048, 5632, 22, 32, 4, False, {}),
    "SmolLM2-135M": ("llama", 49152, 576, 1536, 30, 9, 3, True, {}),
    "SmolLM2-360M": ("llama", 49152, 960, 2560, 32, 15, 5, True, {}),
    "SmolLM2-1.7B": ("llama", 49152, 2048, 8192, 24, 32, 32, True, {}),
    "Llama-3.2-1B": ("llama", 128256, 2048, 8192, 16, 32, 8, True, {"head_dim": 64}),
    "Llama-3.2-3B": ("llama", 128256, 3072, 8192, 28, 24, 8, True, {"head_dim": 128}),
    "Llama-3.1-8B": ("llama", 128256, 4096, 14336, 32, 32, 8, False, {}),
    "Llama-2-7b-hf": ("llama", 32000, 4096, 11008, 32, 32, 32, False, {}),
    "Llama-2-70b-hf": ("llama", 32000, 8192, 28672, 80, 64, 8, False, {}),
    "deepseek-coder-1.3b": ("llama", 32256, 2048, 5504, 24, 16, 16, False, {}),
    "Mistral-7B-v0.1": ("mistral", 32000, 4096, 14336, 32, 32, 8, False, {}),
    "Mistral-7B-v0.3": ("mistral", 32768, 4096, 14336, 32, 32, 8, False, {"sliding_window": None}),
    "Qwen2.5-0.5B": ("qwen2", 151936, 896, 4864, 24, 14, 2, True, {}),
    "Qwen2.5-1.5B": ("qwen2", 151936, 1536, 8960, 28, 12, 2, True, {}),
    "Qwen2.5-3B": ("qwen2", 151936, 2048, 11008, 36, 16, 2, True, {}),
    "Qwen2.5-7B": ("qwen2", 152064, 3584, 18944, 28, 28, 4, False, {}),
}
_MEASURED = ("max_memory_allocated", "peak allocated by torch")


@dataclasses.dataclass(frozen=True)
class Simulated:
    """A row, with what was simulated for it, in GiB."""

    row: dict[str, str]
    allocated: float
    reserved: float
    formula: float
    seconds: float

    @property
    def measured(self) -> float:
        """The measured figure, in GiB."""
        return float(self.row["gib"])

    @property
    def is_allocated(self) -> bool:
        """True for a figure of the allocator, False for one of the whole process."""
        return self.row["metric"] in _MEASURED

    @property
    def error(self) -> float:
        """How far the simulated figure is above the measured one, as a share of it."""
        return (self.allocated if self.is_allocated else self.reserved) / self.measured - 1

    @property
    def formula_error(self) -> float:
        """The same for the formula."""
        return self.formula / self.measured - 1


def architecture(model: str) -> tuple[Any, ...] | None:
    """Return the architecture of a model by its name in the table, with or without its maker."""
    name = re.sub(r"-(Instruct|hf|Chat)\b|Coder-(?=\d)", "", model.split("/")[-1]).lower()
    for known, values in ARCHITECTURES.items():
        if re.sub(r"-(hf|chat)\b", "", known.lower()) in (name, name.removesuffix("-instruct")):
            return values
    return next((v for k, v in ARCHITECTURES.items() if name.startswith(k.lower())), None)


def options_of(row: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the options of a row's target; None if it cannot be rebuilt."""
    if row["method"] not in ("full", "LoRA", "QLoRA") or not row["seq"].isdigit():
        return None
    if not row["batch"].isdigit() or (row["quant"] and "nf4" not in row["quant"]):
        return None
    precision = row["precision"]
    targets = re.sub(r"\b([qkvo])\b", r"\1_proj", row["lora_targets"].split("(")[0]).split()
    return {
        "seq": int(row["seq"]),
        "lora": int(row["lora_r"] or 0) if row["method"] != "full" else 0,
        "quantize": "4bit" if row["quant"] else "",
        "precision": "fp16" if precision.startswith("fp16") else "bf16",
        "attention": row["attention"].partition("_")[0].partition(",")[0].partition(" ")[0],
        "checkpointing": row["checkpointing"].startswith("yes"),
        "targets": ",".join(targets) or "all-linear",
        "autocast": "autocast" in precision,
        "kbit": "kbit" in precision or row["note"].startswith("config baseline"),
        "double_quant": "double" in row["quant"],
        "dropout": 0.1 if "dropout 0.1" in row["note"] else 0.0,
    }


@cache
def simulate(
    name: str,
    options: tuple[tuple[str, Any], ...],
    batch: int,
    gpu: Gpu,
    in_plain_loop: bool,
    expands_keys: bool,
    copies_logits: bool,
) -> Any:
    """Simulate a row; rows that differ in the measurement alone are simulated once."""
    kind, vocabulary, hidden, inner, layers, heads, key_values, tied, further = ARCHITECTURES[name]
    config = {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        **further,
    }
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        Path(folder, "config.json").write_text(json.dumps(config))
        setup = language_model(folder, **dict(options))
    setup = dataclasses.replace(setup, optimizer=find_optimizer("adamw"))
    if in_plain_loop:  # which keeps the output until the next one is there
        setup = dataclasses.replace(setup, step=None)
    if copies_logits:
        base = getattr(setup.model, "get_base_model", lambda: setup.model)()
        base.loss_function = loss_before_5
    probe_options = ProbeOptions(headroom=0.0)
    traces = StepTraces(setup, probe_options, gpu.compute_capability)
    traces.are_general = False  # one size is asked for
    roomy = dataclasses.replace(gpu, total_bytes=1 << 50)
    with replaced(sdpa_attention, "use_gqa_in_sdpa", lambda *_: not expands_keys):
        run = SimulatedProber(traces, roomy, probe_options).replay(batch)
    return setup, run.peak_allocated_bytes, run.peak_reserved_bytes


def loss_before_5(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
    """Return the loss as Transformers 4 computed it, which copied the shifted logits."""
    logits = logits.float()  # alive until the loss is there
    shifted = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    return torch.nn.functional.cross_entropy(shifted, labels[..., 1:].contiguous().view(-1))


def formula(row: Mapping[str, str], values: tuple[Any, ...], setup: Any) -> float:
    """Return bytes by the textbook: weights, gradients, states, activations, logits."""
    _, vocabulary, hidden, _, layers, *_ = values
    parameters = [*setup.model.parameters()]
    weights = sum(p.numel() * p.element_size() for p in parameters)
    trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    tokens = int(row["batch"]) * int(row["seq"])
    a_unit = 2 if row["checkpointing"].startswith("yes") else 34
    return weights + 3 * trained + tokens * (hidden * layers * a_unit + vocabulary * 8)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--source", default="", help="only rows whose GPU or source has this text")
    parser.add_argument("--limit", type=int, default=10**6)
    arguments = parser.parse_args()
    with arguments.table.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "measured" and row["gib"]]
    done: list[Simulated] = []
    skipped: list[str] = []
    for row in rows:
        if arguments.source not in row["gpu"] + row["source"] or len(done) >= arguments.limit:
            continue
        options, values = options_of(row), architecture(row["model"])
        if options is None or values is None or not row["gpu"]:
            skipped.append(f"{row['model']} {row['method']}")
            continue
        name = next(name for name, known in ARCHITECTURES.items() if known is values)
        started = time.process_time()
        try:
            gpu = find_gpu(
                re.sub(r"-SXM4-", " ", row["gpu"]).replace("80G", "80GB").replace("BB", "B")
            )
            setup, allocated, reserved = simulate(
                name,
                tuple(options.items()),
                int(row["batch"]),
                gpu,
                in_plain_loop="plain loop" in row["note"],
                expands_keys="K/V expanded" in row["attention"],
                copies_logits="transformers 4." in row["stack"],
            )
        except BatchFinderError as error:
            skipped.append(f"{row['model']} {row['method']}: {error}")
            continue
        expected = formula(row, values, setup)
        seconds = time.process_time() - started
        one = Simulated(row, allocated / GIB, reserved / GIB, expected / GIB, seconds)
        done.append(one)
        label = f"{row['model'].split('/')[-1]:28} {row['method']:6}"
        print(
            f"{label} b{row['batch']:>2} s{row['seq']:>5}"
            f" {row['attention'][:5]:5} {row['gpu']:14} {one.measured:8.3f} GiB"
            f"  {one.error:+7.2%}  formula {one.formula_error:+7.1%}  {seconds:5.1f} s",
            flush=True,
        )
    for text in dict.fromkeys(skipped):
        print("skipped:", text)
    report(done, skipped)


def report(done: list[Simulated], skipped: list[str]) -> None:
    """Print and save the errors by GPU and metric, and the summary line."""
    groups: dict[str, list[Simulated]] = {}
    for one in done:
        groups.setdefault(f"{one.row['gpu']}, {one.row['metric']}", []).append(one)
    result: dict[str, Any] = {"groups": {}, "skipped": len(skipped)}
    for name, ones in groups.items():
        errors = sorted(abs(one.error) for one in ones)
        result["groups"][name] = {
            "n": len(ones),
            "median": round(statistics.median(errors), 5),
            "worst": round(errors[-1], 5),
            "formula_median": round(statistics.median(abs(o.formula_error) for o in ones), 5),
        }
        print(name, result["groups"][name])
    parts = []
    for name, is_allocated in (("allocated", True), ("process", False)):
        errors = [abs(one.error) for one in done if one.is_allocated is is_allocated]
        if errors:
            parts.append(
                f"{name} median {statistics.median(errors):.2%}, worst {max(errors):.2%},"
                f" n {len(errors)}"
            )
    result["rows"] = [
        {
            **{
                key: one.row[key] for key in ("model", "method", "batch", "seq", "attention", "gpu")
            },
            "measured_gib": one.measured,
            "simulated_gib": round(one.allocated if one.is_allocated else one.reserved, 3),
        }
        for one in done
    ]
    target = ROOT / "scripts" / "results" / "llm.json"
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("llm:", "; ".join(parts))


if __name__ == "__main__":
    main()
