"""Set the largest batch size in a Trainer of transformers, then train.

The model is small and made here, so nothing is downloaded.

Try it:  python scripts/examples/fit_trainer.py
Or from outside:
  batchfinder run -- python scripts/examples/fit_trainer.py --batch-size {batch_size}
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from batchfinder import set_max_batch

TOKENS, LENGTH, EXAMPLES = 100, 16, 256


def main() -> None:
    """Train for one epoch with 64 examples in each optimizer step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, help="default: the largest that trains")
    batch_size = parser.parse_args().batch_size

    config = GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    texts = torch.randint(TOKENS, (EXAMPLES, LENGTH))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            GPT2LMHeadModel(config),
            TrainingArguments(
                folder,
                per_device_train_batch_size=batch_size or 1,
                num_train_epochs=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        )
        if batch_size is None:
            set_max_batch(trainer, global_batch_size=64)
        loss = trainer.train().training_loss
    args = trainer.args
    print(
        f"trained with batch size {args.per_device_train_batch_size} x "
        f"{args.gradient_accumulation_steps}: loss {loss:.3f}"
    )


if __name__ == "__main__":
    main()
