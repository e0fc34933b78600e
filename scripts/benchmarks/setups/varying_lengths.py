"""BERT or GPT-2 on texts of varying length, by a loop over a DataLoader."""

from __future__ import annotations

from typing import Any

import setup_loop
import torch
from text_data import Texts, drawn, of_texts, of_tokens
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel


def target(model: str = "bert", layers: int = 6) -> Any:
    """Return the model and batches by the number of the step."""
    from batchfinder import TrainingSetup

    collate = of_texts if model == "bert" else of_tokens
    return TrainingSetup(build(model, layers), make_batch=drawn(collate))


def build(model: str = "bert", layers: int = 6) -> nn.Module:
    """Return the model."""
    if model == "bert":
        return BertForSequenceClassification(BertConfig(num_hidden_layers=layers))
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))


def loader(model: str = "bert", layers: int = 6, batch_size: int = 2) -> DataLoader[Any]:
    """Return the batches of an epoch."""
    collate = of_texts if model == "bert" else of_tokens
    return DataLoader(Texts(), batch_size, shuffle=True, collate_fn=collate)


if __name__ == "__main__":
    torch.manual_seed(setup_loop.seed)
    device = setup_loop.device
    model, optimizer = setup_loop.with_adamw(build)
    step = 0
    while step < setup_loop.steps:
        for batch in loader(**setup_loop.arguments, batch_size=setup_loop.batch_size):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with setup_loop.autocast():
                output = model(**batch)
            loss = output.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == setup_loop.steps:
                break
