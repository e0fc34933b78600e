"""The SFTTrainer of TRL, on texts of varying length.

The counting runtime has no libcuda, which Triton needs: TRL's loss goes without its kernels.
"""

from __future__ import annotations

from typing import Any

import setup_loop
import trl.kernels.chunked_logprob
import trl.trainer.utils
from datasets import Dataset
from text_data import Texts
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

for module in (trl.kernels.chunked_logprob, trl.trainer.utils):
    module._use_triton = lambda device: False


def target(layers: int = 4) -> SFTTrainer:
    """Return the trainer."""
    return trainer_of(build(layers))


def build(layers: int = 4) -> nn.Module:
    """Return a small Qwen2."""
    config = Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=32_000,
    )
    return Qwen2ForCausalLM(config)


def trainer_of(model: nn.Module, batch_size: int = 8, steps: int = -1) -> SFTTrainer:
    """Return a trainer of a model."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "word": 2}, unk_token="word"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    arguments = SFTConfig(
        output_dir="/tmp/unused",
        per_device_train_batch_size=batch_size,
        max_steps=steps,
        seed=42 + setup_loop.seed,
        max_length=512,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    texts = Texts(4000)
    data: Any = Dataset.from_list([texts[index] for index in range(len(texts))])
    return SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)


if __name__ == "__main__":
    model = setup_loop.kept(build)
    trainer_of(model, setup_loop.batch_size, setup_loop.steps).train()
