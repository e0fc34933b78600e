"""Benchmark of what can be estimated: every architecture of transformers, in its own configuration.

    python scripts/benchmarks/bench_coverage.py [--task masked] [--only llama] [--seconds 60]

Builds each model on the "meta" device, in the configuration that its class has by default but with
four layers where it reads text and one number tells them, and estimates its largest batch on an
H200 in bf16. Counted apart is what does not build so (a part has to be installed, or values are
read), and what fails by an error of its own (its batch or configuration has to be another). Writes
each row as it comes to scripts/results/coverage.json. Needs transformers.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import parts.torchvision_without_cuda  # noqa: F401 - before transformers
import torch
import transformers
from parts.case import RESULTS, save
from parts.time_limit import time_limit
from rendering import coverage
from transformers.models.auto import modeling_auto

from batchfinder import TrainingSetup, estimate_max_batch
from batchfinder.probing.devices.versions import versions

TEXTS, TOKENS, CLASSES = 2, 128, 2
SECONDS_OF_SOUND, SAMPLES_PER_SECOND = 2, 16000
LAYERS, PAD = 4, 0
DEPTHS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layer")
GPU, PRECISION = "h200", "bf16"


def main() -> None:
    """Try the architectures asked for, and end with the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=TASKS, action="append")
    parser.add_argument("--only", help="the type of a model, such as llama")
    parser.add_argument("--seconds", type=int, default=60, help="that each may take")
    parser.add_argument("--output", type=Path, default=RESULTS / "coverage.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    content = {
        "versions": {**versions(), "transformers": transformers.__version__},
        "gpu": GPU,
        "precision": PRECISION,
        "rows": rows,
    }
    for task in options.task or TASKS:
        mapping, make_sample = TASKS[task]
        for model_type in sorted(getattr(modeling_auto, mapping)):
            if options.only not in (None, model_type):
                continue
            row = {"task": task, "model_type": model_type}
            row |= tried(
                getattr(modeling_auto, mapping)[model_type],
                model_type,
                make_sample,
                options.seconds,
            )
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
            save(options.output, content)
    print(coverage(rows))


def tried(
    names: str | tuple[str, ...], model_type: str, make_sample: Callable[[Any], Any], seconds: int
) -> dict[str, Any]:
    """How an estimate of one architecture ended.

    Returns:
        ``outcome``: one of those in ``rendering``; and ``reason`` or ``batch_size``, ``seconds``.
    """
    try:
        with time_limit(seconds):
            return estimated(names if isinstance(names, str) else names[0], model_type, make_sample)
    except TimeoutError as error:
        return {"outcome": "too slow", "reason": str(error)}


def estimated(name: str, model_type: str, make_sample: Callable[[Any], Any]) -> dict[str, Any]:
    """The same without a limit.

    Raises:
        TimeoutError: while an estimate is made, what a time limit around it raises.
    """
    started = time.monotonic()
    try:
        config = transformers.AutoConfig.for_model(model_type)
        prepare(config)
        with torch.device("meta"):
            model = getattr(transformers, name)(config)
        sample = make_sample(model.config)
    except Exception as error:  # noqa: BLE001 - whatever a foreign constructor raises
        return {"outcome": "not built", "reason": _told(error)}
    setup = TrainingSetup(model, sample)
    try:
        estimate = estimate_max_batch(setup, gpu=GPU, precision=PRECISION)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - that is what is counted
        outcome = "refused" if "batchfinder find" in str(error) else "failed"
        return {"outcome": outcome, "reason": _told(error)}
    return {
        "outcome": "estimated",
        "batch_size": estimate.batch_size,
        "seconds": round(time.monotonic() - started, 1),
    }


def prepare(config: Any) -> None:
    """Leave a few layers of a model, as the others are alike, and name the tokens it asks for."""
    for name, token in (("pad_token_id", PAD), ("decoder_start_token_id", PAD)):
        if getattr(config, name, None) is None:
            setattr(config, name, token)
    if hasattr(config, "vocab_size") and getattr(config, "layer_types", None) is None:
        for name in DEPTHS:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, min(LAYERS, getattr(config, name)))


def texts(config: Any) -> dict[str, torch.Tensor]:
    """Tokens, each of which is to be told again."""
    text = getattr(config, "text_config", config)
    tokens = torch.randint(10, min(text.vocab_size, 1000), (TEXTS, TOKENS))
    end = getattr(text, "eos_token_id", None)
    tokens[:, -1] = end if isinstance(end, int) else PAD
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def images(config: Any) -> dict[str, torch.Tensor]:
    """Images of the size that the model is made for, or 224 by 224, with their classes."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    labels = torch.arange(TEXTS) % CLASSES
    return {"pixel_values": torch.randn(TEXTS, channels, height, width), "labels": labels}


def maps(config: Any) -> dict[str, torch.Tensor]:
    """Images with a class for each pixel."""
    sample = images(config)
    _, _, height, width = sample["pixel_values"].shape
    return sample | {"labels": torch.zeros(TEXTS, height, width, dtype=torch.int64)}


def speech(config: Any) -> dict[str, torch.Tensor]:
    """Waveforms with what is said in them."""
    sound = torch.randn(TEXTS, SECONDS_OF_SOUND * SAMPLES_PER_SECOND)
    return {"input_values": sound, "labels": torch.randint(1, 20, (TEXTS, 10))}


def sounds_with_classes(config: Any) -> dict[str, torch.Tensor]:
    """Waveforms with their classes."""
    return speech(config) | {"labels": torch.arange(TEXTS) % CLASSES}


def texts_with_classes(config: Any) -> dict[str, torch.Tensor]:
    """Texts with their classes."""
    return texts(config) | {"labels": torch.arange(TEXTS) % CLASSES}


TASKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", texts),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", texts),
    "translation": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", texts),
    "text classes": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", texts_with_classes),
    "image classes": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", images),
    "segmentation": ("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", maps),
    "speech": ("MODEL_FOR_CTC_MAPPING_NAMES", speech),
    "sound classes": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", sounds_with_classes),
}
"""The table of transformers in which the models of each task stand, and what to train them with."""


def _told(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".replace("\n", " ")
    return re.sub(r"/\S*site-packages/", "", text)[:300]  # wherever that is here


if __name__ == "__main__":
    main()
