"""Peaks of training steps: the simulation against PyTorch's own caching allocator, without a GPU.

    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_counted_peaks.py [--only bundled]

The bundled models without convolutions and LSTMs (cuDNN is off there) at batch sizes from 1 to 512;
and the text models of transformers, made small, with random weights. Compared is the highest peak
of bytes allocated in two steps; counted apart is what does not build or run so small, and what the
simulation refuses. Writes each row as it comes to scripts/results/counted_peaks.json.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import transformers
from parts.case import RESULTS, ROOT, save
from parts.paper_devices import FAMILIES
from parts.peak_comparison import compared, in_a_fork
from parts.time_limit import time_limit
from transformers.models.auto import modeling_auto

from batchfinder import TrainingSetup
from batchfinder.errors import BatchFinderError
from batchfinder.probing.devices.versions import versions
from batchfinder.training.loading import load_setup

BUNDLED, SIZES, PRECISIONS = ("mlp", "gpt"), (1, 8, 64, 512), ("fp32", "bf16")
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
TEXTS, TOKENS, WORDS, MOST_PARAMETERS = 64, 128, 2000, 60e6
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), 256),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 512),
    **dict.fromkeys(("ffn_dim", "d_ff"), 512),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("n_layer", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    "num_key_value_heads": 2, "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
SECONDS = 60  # that a text model may take
SHOWN = 0.005  # of the peak; what is further off is printed


def main() -> None:
    """Compare what is asked for, and end with the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="bundled, or the type of a model, such as llama")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.backends.cudnn.enabled = False  # what the counting runtime has not
    rows: list[dict[str, Any]] = []
    for row in chosen(options.only):
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
        if not options.only:
            content = {"versions": {**versions(), "transformers": transformers.__version__}}
            save(RESULTS / "counted_peaks.json", content | {"rows": rows})
    print(summary(rows))


def chosen(only: str | None) -> Iterator[dict[str, Any]]:
    """The rows of one kind of model, or of all."""
    if only in (None, "bundled"):
        yield from bundled()
    if only != "bundled":
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


def text_models(only: str | None = None) -> Iterator[dict[str, Any]]:
    """The text models of transformers."""
    for task in TASKS:
        for model_type in sorted(getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")):
            if only in (None, model_type):
                named = {"model": model_type, "task": task, "precision": "bf16"}
                yield named | {"batch_size": TEXTS} | in_a_fork(tried, task, model_type)


def tried(task: str, model_type: str) -> dict[str, Any]:
    """The comparison of one text model, or why there is none."""
    try:
        with time_limit(SECONDS):
            return compared_small(task, model_type)
    except BatchFinderError as error:
        return {"refused": str(error).partition("\n")[0]}
    except Exception as error:  # noqa: BLE001 - any of hundreds of models may fail its own way
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def compared_small(task: str, model_type: str) -> dict[str, Any]:
    """The comparison, unless the model has parts, such as one for images, that stay large."""
    with torch.device("meta"):
        outline = built(task, model_type)
    if sum(parameter.numel() for parameter in outline.parameters()) > MOST_PARAMETERS:
        return {"error": "does not get small by these options"}
    model = built(task, model_type)
    words = torch.randint(3, WORDS, (2, TOKENS))
    # Without a mask, whose values models read: there are none on the counting runtime.
    sample = {"input_ids": words, "labels": words.clone()}
    return compared(TrainingSetup(model, sample), "bf16", TEXTS)


def built(task: str, model_type: str) -> Any:
    """A text model, as small as its configuration lets it be."""
    usual = transformers.AutoConfig.for_model(model_type)
    config = type(usual)(**{name: size for name, size in SMALL.items() if hasattr(usual, name)})
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = SMALL["decoder_start_token_id"]
    names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")[model_type]
    return getattr(transformers, names if isinstance(names, str) else names[0])(config)


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
