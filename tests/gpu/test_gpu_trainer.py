"""A Trainer of transformers that really trains, against what is found and estimated of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.models import DEVICE, needs_cuda

from batchfinder import estimate_peak_memory, find_max_batch

pytestmark = [*needs_cuda, pytest.mark.filterwarnings("ignore")]  # transformers gives many

BATCH_SIZE = 16


def trainer_of_texts(folder: Path, **args: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(vocab_size=4000, n_embd=256, n_layer=4, n_head=4)
    text = torch.arange(96)
    return transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=BATCH_SIZE,
            max_steps=4,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **args,
        ),
        train_dataset=[{"input_ids": text, "labels": text}] * 1000,
    )


class Images(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"pixel_values": torch.zeros(3, 64, 64), "labels": place % 10}


def trainer_of_images(folder: Path, **args: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.ViTConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=64,
        num_labels=10,
    )
    trainer = trainer_of_texts(folder, **args)
    return transformers.Trainer(
        transformers.ViTForImageClassification(config), trainer.args, train_dataset=Images()
    )


def peak_of_training(trainer: Any) -> int:
    transformers = pytest.importorskip("transformers")
    peaks = []

    class Readings(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            # Not where a step begins: its batches have been fetched by then.
            peaks.append(torch.cuda.max_memory_allocated(DEVICE))
            torch.cuda.reset_peak_memory_stats(DEVICE)

    trainer.add_callback(Readings())
    trainer.train()
    return max(peaks[1:])


@pytest.mark.parametrize(
    ("build", "args"),
    [
        (trainer_of_texts, {}),
        (trainer_of_texts, {"bf16": True}),
        (trainer_of_texts, {"gradient_checkpointing": True}),
        (trainer_of_texts, {"gradient_accumulation_steps": 4}),
        (
            trainer_of_texts,
            {"bf16": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        ),
        (trainer_of_texts, {"label_smoothing_factor": 0.1, "optim": "adafactor"}),
        (trainer_of_images, {"bf16": True, "gradient_accumulation_steps": 16}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.__name__,
)
def test_a_trainer_takes_the_memory_that_was_found_and_estimated(
    build: Callable[..., Any], args: dict[str, Any], tmp_path: Path
) -> None:
    measured = peak_of_training(build(tmp_path, **args))
    torch.cuda.empty_cache()

    trainer = build(tmp_path, **args)
    result = find_max_batch(
        trainer, device=DEVICE, min_batch_size=BATCH_SIZE, max_batch_size=BATCH_SIZE
    )
    found = result.probes[-1].peak_allocated_bytes
    estimate = estimate_peak_memory(trainer, batch_size=BATCH_SIZE, gpu="h200")

    assert result.warnings == ()
    assert found == pytest.approx(measured, rel=0.02)
    assert estimate.peak_allocated_bytes == pytest.approx(measured, rel=0.02)
