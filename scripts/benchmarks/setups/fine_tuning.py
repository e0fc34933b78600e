"""The trainers that fine-tune language models: Transformers' own, and TRL's."""

from __future__ import annotations

import copy
from typing import Any

import setup_loop
import trl
from adapters import LENGTH, WORDS, adapters, base, build
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

TEXTS = 200
SFT: dict[str, dict[str, Any]] = {
    "sft": {},
    "sft-packing": {"packing": True, "packing_strategy": "wrapped"},
    "sft-padding-free": {"padding_free": True, "max_length": None},
    "sft-completion": {"completion_only_loss": True},
}


def target(**options: Any) -> Any:
    """Return the trainer."""
    return trainer_of(model_for(**options), **options)


def model_for(
    trainer: str = "sft",
    weights: str = "plain",
    checkpointing: str = "",
    peft: str = "given",
    **_: Any,
) -> Any:
    """Return the model: with adapters, unless the trainer is given their configuration."""
    if trainer == "reward":
        return reward_model()
    if trainer == "trainer" or peft == "made":
        return build(weights=weights, prepared=weights != "plain", checkpointing=checkpointing)
    return base(weights)


def reward_model() -> Any:
    """Return a Llama that scores texts."""
    from transformers import LlamaForSequenceClassification

    config = base().config
    config.num_labels = 1
    return LlamaForSequenceClassification(config)


def trainer_of(
    model: Any,
    trainer: str = "sft",
    optim: str = "adamw_torch",
    checkpointing: str = "",
    peft: str = "given",
    batch_size: int = 8,
    steps: int = -1,
    **_: Any,
) -> Any:
    """Return a trainer of a model.

    Args:
        model: what to train.
        trainer: "trainer", "dpo", "reward", or one of ``SFT``.
        optim: the name of the optimizer, as the arguments of a Trainer name it.
        checkpointing: "reentrant", "modern" or "".
        peft: "given" to the trainer; "made" before; "" for none.
        batch_size: examples on the device.
        steps: how many to train.
    """
    usual: dict[str, Any] = {
        "output_dir": "/tmp/unused",
        "per_device_train_batch_size": batch_size,
        "max_steps": steps,
        "optim": optim,
        "gradient_checkpointing": bool(checkpointing),
        "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing == "reentrant"},
        "use_cpu": setup_loop.device == "cpu",
        "bf16": setup_loop.in_bf16,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    if trainer == "trainer":
        arguments = TrainingArguments(**usual)
        return Trainer(model=model, args=arguments, train_dataset=tokens())
    adapted = {"peft_config": adapters()} if peft == "given" else {}
    common: dict[str, Any] = {"model": model, "processing_class": tokenizer(), **adapted}
    if trainer == "dpo":
        arguments = trl.DPOConfig(**usual, max_length=2 * LENGTH)
        if not adapted:
            common["ref_model"] = copy.deepcopy(model)
        return trl.DPOTrainer(args=arguments, train_dataset=pairs(), **common)
    if trainer == "reward":
        if adapted:
            adapted["peft_config"].task_type = "SEQ_CLS"
        arguments = trl.RewardConfig(**usual, max_length=2 * LENGTH)
        return trl.RewardTrainer(args=arguments, train_dataset=pairs(prompt=""), **common)
    arguments = trl.SFTConfig(**{**usual, "max_length": LENGTH, **SFT[trainer]})
    data = completions() if trainer == "sft-completion" else texts()
    return trl.SFTTrainer(args=arguments, train_dataset=data, **common)


def tokens() -> Dataset:
    """Return token ids that are their own labels."""
    ids = [index % (WORDS - 1) + 1 for index in range(LENGTH)]
    return Dataset.from_list([{"input_ids": ids, "labels": ids} for _ in range(TEXTS)])


def texts() -> Dataset:
    """Return texts of 16 tokens to the longest."""
    return Dataset.from_list([{"text": text(16 + 16 * (i % 4))} for i in range(TEXTS)])


def completions() -> Dataset:
    """Return prompts with completions."""
    return Dataset.from_list(
        [{"prompt": text(16), "completion": text(8 + 8 * (i % 4))} for i in range(TEXTS)]
    )


def pairs(prompt: str = "w1 w2 w3 w4") -> Dataset:
    """Return pairs of a good and a bad text."""
    rows = [{"chosen": text(32), "rejected": text(16 + 8 * (i % 2))} for i in range(TEXTS)]
    return Dataset.from_list([row | ({"prompt": prompt} if prompt else {}) for row in rows])


def text(words: int) -> str:
    """Return a text of words."""
    return " ".join(f" w{index % 50}" for index in range(words))


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words."""
    known = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index + 2 for index in range(50)}}
    words = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


if __name__ == "__main__":
    arguments = dict(setup_loop.arguments)
    model = setup_loop.kept(model_for)
    trainer_of(model, **arguments, batch_size=setup_loop.batch_size, steps=setup_loop.steps).train()
