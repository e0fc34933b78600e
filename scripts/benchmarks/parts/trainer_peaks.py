"""Peaks of the trainers of Transformers and TRL on the counting runtime, and as estimated.

Import it where nothing else uses the device: bitsandbytes, which trainers import, opens it.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import trl.kernels.chunked_logprob as tiles
from datasets import Dataset
from parts.small_models import WORDS, built
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from batchfinder import estimate_peak_memory

TOKENS, TEXTS, STEPS = 128, 16, 4


def compared_trainer(model_type: str, kind: str, checkpointing: str) -> dict[str, float]:
    """The highest peak of the steps after the first, in MiB, and the estimate.

    Args:
        model_type: an architecture of Transformers.
        kind: "Trainer" or "SFTTrainer".
        checkpointing: "reentrant", "modern" or "".
    """
    trainer = _trainer(model_type, kind, checkpointing)
    simulated = estimate_peak_memory(trainer, gpu="h200", batch_size=TEXTS).peak_allocated_bytes
    peaks = _Peaks()
    trainer.add_callback(peaks)
    if kind == "SFTTrainer":
        _read_no_values()
    trainer.train()
    measured = max(peaks.of_steps[1:])
    return {
        "measured_mib": round(measured / 2**20, 3),
        "simulated_mib": round(simulated / 2**20, 3),
        "difference": round(simulated / measured - 1, 5),
    }


class _Peaks(TrainerCallback):  # type: ignore[misc]
    """The peak of every step, from its predecessor's end to its own."""

    def __init__(self) -> None:
        self.of_steps: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.of_steps.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()


def _trainer(model_type: str, kind: str, checkpointing: str) -> Any:
    usual: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": TEXTS,
        "max_steps": STEPS,
        "gradient_checkpointing": bool(checkpointing),
        "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing == "reentrant"},
        "bf16": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    ids = [index % (WORDS - 3) + 3 for index in range(TOKENS)]
    rows = [{"input_ids": ids, "labels": ids} for _ in range(TEXTS * STEPS)]
    model, data = built("CAUSAL_LM", model_type), Dataset.from_list(rows)
    if kind == "Trainer":
        return Trainer(model=model, args=TrainingArguments(**usual), train_dataset=data)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 2}, unk_token="<pad>"))
    return SFTTrainer(
        model=model,
        args=SFTConfig(**usual, max_length=TOKENS),
        train_dataset=data.remove_columns("labels"),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
        ),
    )


def _read_no_values() -> None:
    """Take every row of a mask, which has no values here, and skip Triton's kernels."""
    for name in ("_forward_kernel", "_backward_kernel"):
        setattr(tiles, name, _Nothing())
    chosen = Tensor.__getitem__

    def chosen_by(tensor: Tensor, index: Any) -> Tensor:
        if isinstance(index, Tensor) and index.dtype is torch.bool and index.is_cuda:
            index.nonzero()  # for its workspaces
            places = torch.empty(index.numel(), index.dim(), dtype=torch.int64, device="cuda")
            index = places.unbind(1)
        return chosen(tensor, index)

    Tensor.__getitem__ = chosen_by  # type: ignore[method-assign, assignment]


class _Nothing:
    """A kernel that does nothing, on any grid."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: None
