"""Benchmark of what can be estimated: every architecture of transformers, in its own configuration.

    python scripts/benchmarks/bench_coverage.py [--task masked] [--only llama] [--seconds 60]

Builds each model on the "meta" device, in the configuration that its class has by default but with
four layers where it reads text and one number tells them, and estimates its largest batch on an
H200 in bf16. Counted apart is what does not build so (a part has to be installed, or values are
read), and what fails by an error of its own (its batch or configuration has to be another). "Causal
LoRA" are the causal language models made small, in sizes with which they train on the CPU, with
adapters on all linear layers and with checkpointing. Writes each row as it comes to
scripts/results/coverage.json. Needs transformers, and peft for LoRA.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import parts.torchvision_without_cuda  # noqa: F401 - before transformers
import torch
import transformers
from parts.case import RESULTS, save
from parts.small_models import small_configs
from parts.time_limit import time_limit
from rendering import coverage
from torch import nn
from torch.utils._pytree import tree_map
from transformers.models.auto import modeling_auto

from batchfinder import TrainingSetup, estimate_max_batch
from batchfinder.probing.devices.versions import versions
from batchfinder.reporting.page.page import page_of
from batchfinder.results.version import SCHEMA_VERSION

TEXTS, TOKENS, CLASSES = 2, 128, 2
SECONDS_OF_SOUND, SAMPLES_PER_SECOND = 2, 16000
LAYERS, PAD, MOST_PARAMETERS = 4, 0, 3e8
DEPTHS = ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layer")
GPU, PRECISION = "h200", "bf16"


def main() -> None:
    """Try the architectures asked for, and end with the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", choices=TASKS, action="append")
    parser.add_argument("--only", action="append", help="the type of a model, such as llama")
    parser.add_argument("--seconds", type=int, default=60, help="that each may take")
    parser.add_argument("--output", type=Path, default=RESULTS / "coverage.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    tasks = options.task or [*TASKS]
    content = {"gpu": GPU, "precision": PRECISION, "versions_by_task": {}, "rows": []}
    if options.output.exists():
        content = json.loads(options.output.read_text())
    rows = {(row["task"], row["model_type"]): row for row in content["rows"]}
    for task in tasks:
        content["versions_by_task"][task] = {
            **versions(),
            "transformers": transformers.__version__,
        }
        classes = getattr(modeling_auto, TASKS[task].mapping)
        for model_type in sorted(classes):
            if model_type not in (options.only or (model_type,)):
                continue
            outcome = tried(classes[model_type], model_type, TASKS[task], options.seconds)
            row = {"task": task, "model_type": model_type, **outcome}
            rows[task, model_type] = row
            print(row, file=sys.stderr, flush=True)
            # In the order of the tasks, and of the names within each.
            ordered = sorted(rows.items(), key=lambda item: ([*TASKS].index(item[0][0]), item[0]))
            content["rows"] = [row for _, row in ordered]
            save(options.output, content)
    print(coverage([*rows.values()]))


class Task(NamedTuple):
    """One kind of models, and how they are trained."""

    mapping: str
    """The table of transformers that lists the models."""

    sample: Callable[[Any], Any]
    """Makes a batch from a model's configuration."""

    config: Callable[[str, str], Any] = lambda model_type, name: shallow_config(model_type)
    """Makes the configuration of an architecture, given its type and the model's class."""

    changed: Callable[[Any], Any] = lambda model: model
    """Changes the model before it is trained."""


def tried(
    names: str | tuple[str, ...], model_type: str, task: Task, seconds: int
) -> dict[str, Any]:
    """How an estimate of one architecture ended.

    Returns:
        ``outcome``: one of those in ``rendering``; and ``reason``, or ``batch_size``, ``seconds``
        and what the report's page of the estimate needs.
    """
    try:
        with time_limit(seconds):
            return estimated(names if isinstance(names, str) else names[0], model_type, task)
    except TimeoutError as error:
        return {"outcome": "too slow", "reason": str(error)}


def estimated(name: str, model_type: str, task: Task) -> dict[str, Any]:
    """The same without a limit.

    Raises:
        TimeoutError: while an estimate is made, what a time limit around it raises.
    """
    started = time.process_time()
    try:
        config = task.config(model_type, name)
        with torch.device("meta"):
            model = task.changed(getattr(transformers, name)(config))
        sample = task.sample(config)
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
    seconds = time.process_time() - started
    page = page_of([{"schema_version": SCHEMA_VERSION, "estimates": [estimate.to_dict()]}])
    return {
        "outcome": "estimated",
        "batch_size": estimate.batch_size,
        "seconds": round(seconds, 1),
        "page_bytes": len(page.encode()),
        "page_seconds": round(time.process_time() - started - seconds, 3),
    }


def shallow_config(model_type: str) -> Any:
    """The default configuration with a few layers, as the others are alike, and special tokens."""
    config = transformers.AutoConfig.for_model(model_type)
    for name, token in (("pad_token_id", PAD), ("decoder_start_token_id", PAD)):
        if getattr(config, name, None) is None:
            setattr(config, name, token)
    if hasattr(config, "vocab_size") and getattr(config, "layer_types", None) is None:
        for name in DEPTHS:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, min(LAYERS, getattr(config, name)))
    return config


def small_config_that_trains(model_type: str, name: str) -> Any:
    """The smallest configuration whose sizes fit each other: its model trains on the CPU.

    Raises:
        Exception: the error of the last try.
    """
    error: Exception | None = None
    for made in small_configs(name):
        error = error_in_training(name, made)
        if error is None:
            return made()
    assert error is not None
    raise error


def error_in_training(name: str, made: Callable[[], Any]) -> Exception | None:
    """Train a model with adapters on the CPU; a large one, if there is no small one, on "meta"."""
    kind = getattr(transformers, name)
    try:
        with torch.device("meta"):
            model = kind(made())
        is_small = sum(parameter.numel() for parameter in model.parameters()) < MOST_PARAMETERS
        config = made()
        device = torch.device("cpu" if is_small else "meta")
        model = with_adapters(kind(config) if is_small else model).to(device)
        model(**tree_map(lambda tensor: tensor.to(device), texts(config))).loss.backward()
    except Exception as error:  # noqa: BLE001 - whatever a foreign constructor raises
        is_of_meta = "meta" in str(error).lower()  # values are read: an estimate has its own means
        return None if is_of_meta else error
    return None


def texts(config: Any) -> dict[str, torch.Tensor]:
    """Return random tokens with an end token: the inputs, and the labels to predict."""
    text = getattr(config, "text_config", config)
    tokens = torch.randint(10, min(getattr(text, "vocab_size", 1000), 1000), (TEXTS, TOKENS))
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


def with_adapters(model: Any) -> Any:
    """The model with LoRA and, if it can, with checkpointing; in training mode."""
    peft: Any = import_module("peft")
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    # PEFT refuses some of Mamba's output projections, whose weight their kernels read themselves,
    # and cannot add to what some layers with a forward of their own return, such as Llama 4's
    # router. Falcon has no others.
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    head = model.get_output_embeddings()
    own = [n for n, part in linear.items() if type(part).forward is not nn.Linear.forward]
    has_others = any(part is not head and name not in own for name, part in linear.items())
    excluded = own if has_others else []
    excluded += [
        f"{name}.out_proj" for name, part in model.named_modules() if hasattr(part, "conv1d")
    ]
    adapters = peft.LoraConfig(
        r=16, target_modules="all-linear", exclude_modules=excluded, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, adapters).train()


TASKS = {
    "causal": Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", texts),
    "causal LoRA": Task(
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", texts, small_config_that_trains, with_adapters
    ),
    "masked": Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", texts),
    "translation": Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", texts),
    "text classes": Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", texts_with_classes),
    "image classes": Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", images),
    "segmentation": Task("MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES", maps),
    "speech": Task("MODEL_FOR_CTC_MAPPING_NAMES", speech),
    "sound classes": Task("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", sounds_with_classes),
}


def _told(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".replace("\n", " ")
    return re.sub(r"/\S*site-packages/", "", text)[:300]  # wherever that is here


if __name__ == "__main__":
    main()
