"""Peaks of training steps: the simulation against PyTorch's own caching allocator, without a GPU.

    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_counted_peaks.py [--only bundled]

The bundled models without convolutions and LSTMs (cuDNN is off there) at batch sizes from 1 to 512;
the text models of transformers, made small, with random weights; and some of them as people
fine-tune them (``--only tuning``): all weights, LoRA, LoRA with checkpointing, DPO, and in the
trainers of Transformers and TRL, which take four steps (needs peft, trl and datasets).
Compared is the highest peak of bytes allocated in two steps; counted apart is what does not build
or run so small, and what the simulation refuses. Writes each row as it comes to
scripts/results/counted_peaks.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from statistics import median
from typing import Any

import torch
import transformers
from parts.case import RESULTS, ROOT, save
from parts.paper_devices import FAMILIES
from parts.peak_comparison import NotRunError, compared, in_a_fork
from parts.small_models import WORDS, built
from parts.time_limit import time_limit
from transformers.models.auto import modeling_auto

from batchfinder import TrainingSetup
from batchfinder.errors import BatchFinderError
from batchfinder.probing.devices.versions import versions
from batchfinder.training.frameworks.language_model import LanguageModelStep, PreferenceStep
from batchfinder.training.loading import load_setup

BUNDLED, SIZES, PRECISIONS = ("mlp", "gpt"), (1, 8, 64, 512), ("fp32", "bf16")
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
TEXTS, TOKENS, MOST_PARAMETERS = 64, 128, 60e6
TUNED = ("llama", "qwen2", "mistral", "gemma", "phi")
TRAINED = ("gpt2", "gpt_bigcode", "llama", "qwen2", "gemma2", "phi")
CHECKPOINTING = {"": "", ", checkpointing": "modern", ", reentrant checkpointing": "reentrant"}
METHODS = ("all weights", "LoRA", "LoRA, checkpointing", "DPO, LoRA")
RESULT_FILE = RESULTS / "counted_peaks.json"
SECONDS = 60  # that a text model may take
SHOWN = 0.005  # of the peak; what is further off is printed


def main() -> None:
    """Compare what is asked for, and end with the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="bundled, tuning, or the type of a model, such as llama")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.backends.cudnn.enabled = False  # what the counting runtime has not
    content = {"versions": {**versions(), "transformers": transformers.__version__}}
    rows: list[dict[str, Any]] = []
    if options.only == "tuning":  # beside the others
        content = json.loads(RESULT_FILE.read_text())
        rows = [row for row in content["rows"] if "method" not in row]
    for row in chosen(options.only):
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        if options.only in (None, "tuning"):
            save(RESULT_FILE, content | {"rows": rows})
    print(summary(rows))


def chosen(only: str | None) -> Iterator[dict[str, Any]]:
    """The rows of one kind of model, or of all."""
    if only in (None, "bundled"):
        yield from bundled()
    if only in (None, "tuning"):
        yield from tuned()
    if only not in ("bundled", "tuning"):
        yield from text_models(only)


def bundled() -> Iterator[dict[str, Any]]:
    """The bundled models, at several batch sizes."""
    for family in BUNDLED:
        target = str(ROOT / "scripts" / "examples" / f"train_{family}.py:build_model")
        for precision in PRECISIONS:
            for size in SIZES:
                named = {"model": family, "precision": precision, "batch_size": size}
                yield named | in_a_fork(compared_bundled, target, family, precision, size)


def compared_bundled(target: str, family: str, precision: str, size: int) -> dict[str, float]:
    """The comparison of one bundled model."""
    setup, _ = load_setup(target, FAMILIES[family])
    return compared(setup, precision, size)


def tuned() -> Iterator[dict[str, Any]]:
    """Models that are fine-tuned, by each method."""
    for model_type in TUNED:
        for method in METHODS:
            named = {"model": model_type, "task": "tuning", "method": method, "precision": "bf16"}
            yield named | {"batch_size": TEXTS} | in_a_fork(tried, model_type, tuned_setup, method)

    for model_type in TRAINED:
        for kind in ("Trainer", "SFTTrainer"):
            for text, checkpointing in CHECKPOINTING.items():
                named = {"model": model_type, "task": "tuning", "method": kind + text}
                yield named | in_a_fork(trained, model_type, kind, checkpointing)


def trained(model_type: str, kind: str, checkpointing: str) -> dict[str, float]:
    """The comparison of one trainer. Import what opens the device in this process only."""
    for name in ("sdpa", "eager"):  # which read the mask's values
        transformers.AttentionMaskInterface.register(name, lambda *_, **__: None)
    made: Any = import_module("parts.trainer_peaks")
    compared_rows: dict[str, float] = made.compared_trainer(model_type, kind, checkpointing)
    return compared_rows


def tuned_setup(model_type: str, method: str) -> TrainingSetup:
    """One model and how it is fine-tuned."""
    peft: Any = import_module("peft")
    # Without values, transformers takes the texts for packed ones and makes a mask.
    transformers.AttentionMaskInterface.register("sdpa", lambda *_, **__: None)
    model = built("CAUSAL_LM", model_type)
    if method == "LoRA, checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if method != "all weights":
        adapters = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters)
    words = torch.randint(3, WORDS, (2, TOKENS))
    if method == "DPO, LoRA":
        pair = {"chosen": words, "rejected": words.clone()}
        return TrainingSetup(model.train(), pair, step=PreferenceStep(None, None))
    sample = {"input_ids": words, "labels": words.clone()}
    return TrainingSetup(model.train(), sample, step=LanguageModelStep(None))


def text_models(only: str | None = None) -> Iterator[dict[str, Any]]:
    """The text models of transformers."""
    for task in TASKS:
        for model_type in sorted(getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")):
            if only in (None, model_type):
                named = {"model": model_type, "task": task, "precision": "bf16"}
                yield (
                    named | {"batch_size": TEXTS} | in_a_fork(tried, model_type, small_setup, task)
                )


def tried(model_type: str, make: Callable[[str, str], TrainingSetup], kind: str) -> dict[str, Any]:
    """The comparison of one text model, or why there is none."""
    try:
        with time_limit(SECONDS):
            return compared(make(model_type, kind), "bf16", TEXTS)
    except BatchFinderError as error:
        return {"refused": str(error).partition("\n")[0]}
    except Exception as error:  # noqa: BLE001 - any of hundreds of models may fail its own way
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def small_setup(model_type: str, task: str) -> TrainingSetup:
    """A text model, unless it has parts, such as one for images, that stay large."""
    with torch.device("meta"):
        outline = built(task, model_type)
    if sum(parameter.numel() for parameter in outline.parameters()) > MOST_PARAMETERS:
        raise NotRunError("does not get small by these options")
    words = torch.randint(3, WORDS, (2, TOKENS))
    # Without a mask, whose values models read: there are none on the counting runtime.
    sample = {"input_ids": words, "labels": words.clone()}
    return TrainingSetup(built(task, model_type), sample)


def summary(rows: list[dict[str, Any]]) -> str:
    """How many are near, and what is not."""
    differences = [row["difference"] for row in rows if "difference" in row] or [0.0]
    off = [row for row in rows if abs(row.get("difference", 0)) > SHOWN]
    lines = [f"{row['difference']:+.1%} {row['model']} {row.get('task', '')}" for row in off]
    refused = sum("refused" in row for row in rows)
    lines.append(
        f"{len(differences) - len(off)} of {len(differences)} within {SHOWN:.1%}, median "
        f"{median(map(abs, differences)):.2%}; {refused} refused, "
        f"{sum('error' in row for row in rows)} cannot be made that small"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
