"""Architectures of transformers, made small."""

from __future__ import annotations

from collections.abc import Iterator
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
# Where those sizes do not fit each other: as many heads for keys, fewer experts for each token in
# one group, and last the widths that the class has by default.
ALIKE = {**SMALL, "num_key_value_heads": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
WIDTHS = ("hidden_size", "heads", "d_model", "n_embd", "n_head", "intermediate", "ffn", "embedding")
SHALLOW = {name: size for name, size in ALIKE.items() if not any(w in name for w in WIDTHS)}

# What some classes need besides, because their defaults are not those of any model.
NEEDED: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 64},
    "moshi": {"audio_vocab_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
}


def small_configs(name: str) -> Iterator[Any]:
    """Yield functions that make configurations of a class of models, the smallest first."""
    kind = getattr(transformers, name).config_class
    for sizes in (SMALL, ALIKE, SHALLOW):
        yield lambda sizes=sizes: kind(**_known(kind, sizes))


def _known(kind: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Return what a configuration needs, and its parts, such as a text model."""
    usual = kind()
    parts = {
        name: _known(part, sizes)
        for name, part in kind.sub_configs.items()
        if hasattr(part, "sub_configs") and hasattr(usual, name)
    }
    own = {name: size for name, size in sizes.items() if hasattr(usual, name)}
    return own | parts | NEEDED.get(kind.model_type, {})


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
