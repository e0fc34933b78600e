"""Adapters of PEFT on a tiny Llama, plain or quantized by bitsandbytes, trained in a plain loop."""

from __future__ import annotations

import tempfile
from typing import Any

import bitsandbytes
import setup_loop
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from batchfinder import TrainingSetup

LENGTH, WORDS, WIDTH = 64, 4000, 128
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
}
QUANTIZED = {
    "4bit": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "8bit": BitsAndBytesConfig(load_in_8bit=True),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adamw_8bit": bitsandbytes.optim.AdamW8bit,
    "paged_adamw_8bit": bitsandbytes.optim.PagedAdamW8bit,
}


def target(optimizer: str = "adamw", **options: Any) -> TrainingSetup:
    """Return the model, one batch, and the optimizer of the adapters."""
    return TrainingSetup(build(**options), make_batch(2), optimizer=OPTIMIZERS[optimizer])


def build(
    kind: str = "lora", weights: str = "plain", checkpointing: str = "", prepared: bool = False
) -> Any:
    """Return the model.

    Args:
        kind: one of ``KINDS``.
        weights: "plain", "4bit" or "8bit".
        checkpointing: "reentrant", "modern" or "".
        prepared: prepare the base by ``prepare_model_for_kbit_training``.
    """
    torch.manual_seed(0)
    model: Any = base(weights)
    options = {"use_reentrant": checkpointing == "reentrant"}
    if prepared:
        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=bool(checkpointing),
            gradient_checkpointing_kwargs=options,
        )
    elif checkpointing:
        model.gradient_checkpointing_enable(options)
        model.enable_input_require_grads()
    return get_peft_model(model, adapters(kind))


def adapters(kind: str = "lora") -> LoraConfig:
    """Return the configuration of adapters on all linear layers."""
    return LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", **KINDS[kind])


def base(weights: str = "plain") -> Any:
    """Return a Llama in evaluation mode, as ``from_pretrained`` does, with quantized layers."""
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        pad_token_id=0,
        use_cache=False,
    )
    if weights == "plain":
        return LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        return LlamaForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            quantization_config=QUANTIZED[weights],
            device_map={"": setup_loop.device},
        )


def make_batch(batch_size: int) -> dict[str, Tensor]:
    """Return token ids that are their own labels."""
    ids = torch.arange(batch_size * LENGTH).reshape(batch_size, LENGTH) % (WORDS - 1) + 1
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def start(optimizer: str = "adamw", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model on the device, and the optimizer of its adapters."""
    model = build(**options).to(setup_loop.device).train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, OPTIMIZERS[optimizer](trainable, lr=1e-4)


if __name__ == "__main__":
    device = setup_loop.device
    model, optimizer = setup_loop.kept(start)
    for batch in (make_batch(setup_loop.batch_size) for _ in range(setup_loop.steps)):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        output = model(**batch)
        loss = output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
