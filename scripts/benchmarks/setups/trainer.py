"""The Trainer of Transformers, on texts of varying length."""

from __future__ import annotations

from typing import Any

import setup_loop
from text_data import Texts, of_texts, of_tokens
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)


def target(model: str = "bert", layers: int = 6, skew: float = 2.0) -> Trainer:
    """Return the Trainer."""
    return trainer_of(build(model, layers), model, skew)


def build(model: str = "bert", layers: int = 6, **_: Any) -> nn.Module:
    """Return the model."""
    if model == "bert":
        return BertForSequenceClassification(BertConfig(num_hidden_layers=layers))
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))


def trainer_of(
    model: nn.Module, kind: str = "bert", skew: float = 2.0, batch_size: int = 8, steps: int = -1
) -> Trainer:
    """Return a Trainer of a model."""
    arguments = TrainingArguments(
        output_dir="/tmp/unused",
        per_device_train_batch_size=batch_size,
        max_steps=steps,
        seed=42 + setup_loop.seed,
        bf16=setup_loop.in_bf16,
        use_cpu=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    collate = of_texts if kind == "bert" else of_tokens
    return Trainer(
        model=model, args=arguments, train_dataset=Texts(skew=skew), data_collator=collate
    )


if __name__ == "__main__":
    kind = setup_loop.arguments.get("model", "bert")
    skew = setup_loop.arguments.get("skew", 2.0)
    model = setup_loop.kept(build)
    trainer_of(model, kind, skew, setup_loop.batch_size, setup_loop.steps).train()
