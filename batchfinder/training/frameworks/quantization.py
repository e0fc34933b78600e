"""Quantized weights of language models, as bitsandbytes makes and trainers prepare them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from batchfinder.errors import TargetError

PREPARED = {
    "trl": "adapters in bf16, as TRL trains them",
    "peft": "head, embeddings and norms in fp32, as PEFT prepares them",
    "trl0": "norms in fp32, as TRL prepared them before version 1",
    "none": "not prepared",
}
"""Who prepares the weights of a quantized model, and what that means."""


def imported(name: str) -> Any:
    """Import a library that targets ``hf:...`` need."""
    try:
        return import_module(name)
    except ImportError as error:
        raise TargetError(f"a target hf:... needs {name}. Try pip install {name}.") from error


def quantize_weights(model: Any, kind: str, dtype: torch.dtype, double: bool) -> None:
    """Replace the linear layers, except the head, by quantized ones of bitsandbytes."""
    library = imported("bitsandbytes")
    layers, functional = library.nn, library.functional
    with torch.device("cpu"):  # the table is cached and later used for tensors with data too
        functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    head = model.get_output_embeddings()
    linear = [
        (name, part)
        for name, part in model.named_modules()
        if type(part) is nn.Linear and part is not head
    ]
    for name, old in linear:
        sizes = (old.in_features, old.out_features, old.bias is not None)
        with torch.device("meta"):
            new: Any = (
                layers.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4")
                if kind == "4bit"
                else layers.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=0.0)
            )
        weight = old.weight.detach()
        if kind == "4bit":
            new.weight = layers.Params4bit(
                weight, quant_type="nf4", compress_statistics=double, module=new
            )
        else:
            new.weight = layers.Int8Params(weight, requires_grad=False)
        new.weight._quantize(weight.device)
        new.bias = old.bias
        model.set_submodule(name, new)
    model.requires_grad_(False)
    model.is_quantized = True
    setattr(model, f"is_loaded_in_{kind}", True)


def prepare_weights(model: Any, by: str, dtype: torch.dtype) -> None:
    """Cast the weights of a quantized model that are not quantized."""
    if by in ("trl", "none"):
        return
    imported("peft").prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if by == "trl0":
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            part.to(dtype)


def cast_adapters(model: nn.Module) -> None:
    """Cast the trained weights to bf16."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
