"""Models that people train, with random weights from their configurations: nothing is downloaded.

Each function returns the model and one batch of it. Needs transformers, and timm with torchvision.
"""

from __future__ import annotations

from typing import Any

import parts.torchvision_without_cuda  # noqa: F401 - before transformers and timm, which import it
import torch
from torch import Tensor, nn

TOKENS = 128
IMAGE = 224
CLASSES = 1000
FRAMES = 3000  # half a minute of sound, which is all that Whisper takes

Built = tuple[nn.Module, Any]


def build_gpt2() -> Built:
    """GPT-2 small, 124 M parameters, as a language model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config()
    return GPT2LMHeadModel(config), _language(config.vocab_size)


def build_bert() -> Built:
    """BERT base, 110 M parameters, on masked words."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig()
    return BertForMaskedLM(config), _language(config.vocab_size)


def build_t5() -> Built:
    """T5 small, 60 M parameters, from one text to another."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(decoder_start_token_id=0)
    return T5ForConditionalGeneration(config), _language(config.vocab_size)


def build_llama() -> Built:
    """A Llama of 125 M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config), _language(config.vocab_size)


def build_vit() -> Built:
    """ViT base with patches of 16, 86 M parameters, on image classes."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_labels=CLASSES)
    images, labels = _images()
    return ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


def build_whisper() -> Built:
    """Whisper tiny, 38 M parameters, from sound to text."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig()
    sample = {
        "input_features": torch.randn(2, config.num_mel_bins, FRAMES),
        "labels": torch.randint(config.vocab_size, (2, TOKENS)),
    }
    return WhisperForConditionalGeneration(config), sample


def build_resnet50() -> Built:
    """ResNet-50, 26 M parameters."""
    return _timm("resnet50")


def build_convnext() -> Built:
    """ConvNeXt tiny, 29 M parameters."""
    return _timm("convnext_tiny")


def build_efficientnet() -> Built:
    """EfficientNet-B0, 5 M parameters."""
    return _timm("efficientnet_b0")


def build_swin() -> Built:
    """Swin tiny, 28 M parameters."""
    return _timm("swin_tiny_patch4_window7_224")


def _timm(name: str) -> Built:
    from timm import create_model

    model: nn.Module = create_model(name, pretrained=False)
    return model, _images()


def _language(vocabulary: int) -> dict[str, Tensor]:
    tokens = torch.randint(vocabulary, (2, TOKENS))
    return {"input_ids": tokens, "labels": tokens}


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, IMAGE, IMAGE), torch.randint(CLASSES, (2,))
