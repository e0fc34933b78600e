"""LoRA of PEFT on a small Llama whose base is in bfloat16."""

from __future__ import annotations

from typing import Any

import setup_loop
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 512


def target(layers: int = 6, width: int = 1024) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model and one batch."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        use_cache=False,
    )
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    adapters = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: Any = get_peft_model(base, adapters)
    return model, make_batch(2)


def make_batch(batch_size: int) -> dict[str, Tensor]:
    """Return token ids that are their own labels."""
    ids = torch.ones(batch_size, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


if __name__ == "__main__":
    device = setup_loop.device
    model, optimizer = setup_loop.with_adamw(target)
    for batch in (make_batch(setup_loop.batch_size) for _ in range(setup_loop.steps)):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        output = model(**batch)
        loss = output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
