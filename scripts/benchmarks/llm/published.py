"""Published measurements of fine-tuning: what a row of the table says, and its training setup."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llm.older import older_experts, use_older_forward

from batchfinder.errors import BatchFinderError
from batchfinder.simulation.gpus import Gpu, find_gpu, unnamed_gpu
from batchfinder.training.frameworks.language_model import language_model
from batchfinder.training.optimizer import find_optimizer
from batchfinder.training.setup import TrainingSetup
from batchfinder.units import GIB

Row = Mapping[str, str]

# The training scripts of some sources, where the table leaves a cell empty: their defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "QwenLM/Qwen ": {"lora": 64, "dropout": 0.05},
    "QwenLM/Qwen2": {"lora": 64, "dropout": 0.05},
}
# Tokens of the longest batch where they are not published. At 710, with the output kept into the
# next step, 20 methods of PEFT's comparison came out 2.3 % too high in the median; 685 corrects it.
_FITTED_TOKENS = {"method_comparison": 685}
_LORA = {"lora", "qlora"}
_LONG = {"max_position_embeddings": 32768}  # of models without a table of positions


class UnknownRowError(BatchFinderError):
    """A row that cannot be simulated, with the reason."""


def key_of(row: Row) -> str:
    """Return a short name of a row by its contents."""
    return hashlib.sha256(json.dumps(dict(row), sort_keys=True).encode()).hexdigest()[:12]


def kind_of(row: Row) -> str:
    """Return what a row's figure counts: "allocated", "process" or "out of memory"."""
    if "out of memory" in row["metric"]:
        return "out of memory"
    return "allocated" if re.search("allocated|active", row["metric"]) else "process"


def gpu_of(row: Row) -> Gpu:
    """Return a row's GPU. Figures of PyTorch's allocator need none: they use the default kernels.

    Raises:
        UnknownRowError: the GPU is not known.
    """
    name = re.sub(r"-SXM4-|Tesla", " ", row["gpu"])
    name = re.sub(r"(?<=\s)(\d+) ?GB?\b", r"\1GB", name).strip()
    try:
        if not name and kind_of(row) == "process" and "reserved" not in row["metric"]:
            raise UnknownRowError("the GPU is not given")
        return find_gpu(name) if name else unnamed_gpu(80 * GIB)
    except BatchFinderError as error:
        raise UnknownRowError(str(error).partition(".")[0]) from error


def config_of(row: Row) -> dict[str, Any]:
    """Return the configuration of a row's model.

    Raises:
        UnknownRowError: the model is not in ``architectures.json``.
    """
    name = re.sub(r"coder-(?=\d)", "", row["model"].split("/")[-1].lower())
    name = re.sub(r"^(codellama-|llama )", "llama-", name).replace(" ", "-")
    known = {key.lower(): value for key, value in _architectures().items()}
    for key in sorted(known, key=len, reverse=True):
        if name.startswith(key):
            config = known[key]
            return config if "n_positions" in config else {**_LONG, **config}
    raise UnknownRowError(f"the architecture of {row['model']} is not in architectures.json")


def _architectures() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(Path(__file__).with_name("architectures.json").read_text())
    return known


def options_of(row: Row) -> dict[str, Any]:
    """Return the options of the ``hf:`` target that trains as a row says.

    Raises:
        UnknownRowError: a cell of the row cannot be read, or is not simulated.
    """
    method = row["method"].lower().split()
    precision, note, quantization = row["precision"], row["note"], row["quant"].lower()
    length = re.match(r"\D*(\d+)", row["seq"])
    if length is None:
        raise UnknownRowError("the length is not given")
    if not row["batch"].isdigit():
        raise UnknownRowError("the batch size is not given")
    if "compile" in note or "cumulative" in note or "compiled" in precision:
        raise UnknownRowError("torch.compile is not simulated")
    if quantization and not re.search("nf4|gptq int4", quantization):
        raise UnknownRowError(f"weights in {quantization} are not simulated")
    if "qlora" in method and not quantization:
        raise UnknownRowError("the kind of 4-bit weights is not given")
    targets = re.sub(r"\b([qkvo])\b", r"\1_proj", row["lora_targets"].split("(")[0]).split()
    rank = re.match(r"\d+", row["lora_r"])
    is_adapted = bool(_LORA & {*method})
    prepared = "kbit" in precision or "gptq" in quantization
    older = re.search(r"trl 0\.", row["stack"]) and "baseline" in note
    fitted = (size for text, size in _FITTED_TOKENS.items() if text in row["source"])
    options: dict[str, Any] = {
        "seq": next(fitted, int(length[1])),
        "method": "dpo" if "dpo" in method else "full" if not is_adapted else "",
        "precision": "fp16" if "fp16" in precision else "bf16",
        "attention": re.split("[_, ]", row["attention"])[0] or "sdpa",
        "checkpointing": row["checkpointing"].startswith("yes"),
        "autocast": not re.search("pure|-true|fp16", precision),
    }
    if is_adapted:
        rules = (rule for text, rule in _DEFAULTS.items() if text in row["source"])
        options |= {
            "lora": int(rank[0]) if rank else 16,
            "quantize": "4bit" if quantization else "",
            "targets": ",".join(targets) if targets and targets != ["all"] else "all-linear",
            "prepare": "peft" if prepared else "trl0" if older else "none",
            "double_quant": "double" in quantization or "gptq" in quantization,
            "dropout": 0.1 if "dropout 0.1" in note else 0.0,
            **next(rules, {}),
        }
    return options


def setup_of(row: Row, adapters: Path | None) -> TrainingSetup:
    """Make the training setup of a row, on the meta device.

    Args:
        row: a row of the table.
        adapters: a folder with ``METHOD/EXPERIMENT/adapter_config.json``, as in PEFT's comparison
            of methods, whose note is ``METHOD--EXPERIMENT``; None: defaults of the method.

    Raises:
        UnknownRowError: the row cannot be simulated.
        BatchFinderError: the model cannot be made.
    """
    is_own = _has_own(row, adapters)
    options = options_of({**row, "method": "full"} if is_own else row)
    config, is_old = config_of(row), "transformers 4." in row["stack"]
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        Path(folder, "config.json").write_text(json.dumps(config))
        names = [name.partition(".")[0] for name in _linear_layers(json.dumps(config))]
        wanted = options.get("targets", "all-linear")
        if wanted != "all-linear" and not {*wanted.split(",")} & {*names}:
            fused = [name for name in names if re.search("attn|qkv|query", name)]
            options["targets"] = ",".join(fused or ["all-linear"])
        with older_experts() if is_old else nullcontext():
            setup = language_model(folder, **options)
        if is_own or row["method"].lower().split()[0] not in {*_LORA, "full"}:
            setup = dataclasses.replace(setup, model=_adapted(setup.model, row, adapters))
    setup = dataclasses.replace(setup, optimizer=find_optimizer("adamw"))
    if (
        "plain loop" in row["note"] or "method_comparison" in row["source"]
    ):  # which keeps the output until the next one is there
        setup = dataclasses.replace(setup, step=None)
    if is_old:
        use_older_forward(setup.model)
    return setup


@cache
def _linear_layers(config: str) -> tuple[str, ...]:
    """Return the names of the linear layers inside the blocks of a model."""
    plain = plain_model(config)
    layers = {
        name.rpartition(".")[2]
        for name, part in plain.named_modules()
        if re.search(r"\.\d+\.", name) and type(part).__name__ in ("Linear", "Conv1D")
    }
    return tuple(sorted(layers))


def plain_model(config: str) -> Any:
    """Make the model of a configuration in fp32 on the meta device, without adapters."""
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        Path(folder, "config.json").write_text(config)
        return language_model(folder, method="full", precision="fp32", seq=8).model


def _folder(row: Row, adapters: Path) -> Path:
    method, _, experiment = row["note"].partition(";")[0].partition("--")
    return adapters / method / experiment


def _has_own(row: Row, adapters: Path | None) -> bool:
    return adapters is not None and "--" in row["note"] and _folder(row, adapters).is_dir()


def _adapted(model: Any, row: Row, adapters: Path | None) -> Any:
    """Return a model with the adapters of one of PEFT's methods."""
    import peft

    if adapters is not None and _has_own(row, adapters):
        kept = _folder(row, adapters) / "adapter_config.json"
        if not kept.exists():
            return model  # full fine-tuning
        config = peft.PeftConfig.from_pretrained(str(kept.parent))
    else:
        kinds: dict[str, Any] = {
            str(getattr(kind, "value", kind)).lower(): found
            for kind, found in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()
        }
        method = row["method"].lower()
        method = {"adaptionprompt": "adaption_prompt", "prefixtuning": "prefix_tuning"}.get(
            method, method
        )
        if method not in kinds:
            raise UnknownRowError(f"PEFT has no method {row['method']}")
        fields = {field.name for field in dataclasses.fields(kinds[method])}
        given = {"r": row["lora_r"] and int(row["lora_r"]), "target_modules": row["lora_targets"]}
        config = kinds[method](
            task_type="CAUSAL_LM",
            **{
                name: value.split() if isinstance(value, str) else value
                for name, value in given.items()
                if value and name in fields
            },
        )
    config.inference_mode = False
    return peft.get_peft_model(model, config).train()
