"""Architectures of transformers, made small."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.auto import modeling_auto

WORDS = 2000
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size"), 256),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 512),
    **dict.fromkeys(("ffn_dim", "d_ff"), 512),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("n_layer", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "num_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    "num_key_value_heads": 2, "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def small_config(model_type: str) -> Any:
    """Return a configuration of an architecture that is as small as its class allows."""
    usual = transformers.AutoConfig.for_model(model_type)
    config = type(usual)(**{name: size for name, size in SMALL.items() if hasattr(usual, name)})
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = SMALL["decoder_start_token_id"]
    return config


def built(task: str, model_type: str) -> Any:
    """Return a text model, as small as its configuration allows."""
    names = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")[model_type]
    name = names if isinstance(names, str) else names[0]
    return getattr(transformers, name)(small_config(model_type))
