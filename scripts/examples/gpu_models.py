"""Models that people train on GPUs, each with one batch: targets for ``gpu_acceptance.py``.

Try it: batchfinder find scripts/examples/gpu_models.py:gpt2 --device cuda --precision bf16

Nothing is downloaded: all weights are random. Needs timm for ``resnet50`` and ``vit_base``,
Transformers for ``gpt2`` and ``bert_base``.
"""

from __future__ import annotations

import torch
import train_lstm
import train_unet
from torch import Tensor, nn

# As most people train on Ampere and newer. It makes fp32 faster and changes no memory.
torch.set_float32_matmul_precision("high")


def resnet50() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The ResNet-50 of timm, on ImageNet-sized images."""
    return _timm("resnet50")


def vit_base() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The ViT-B/16 of timm, on ImageNet-sized images."""
    return _timm("vit_base_patch16_224")


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-2 (124 M parameters) of Transformers, on 512 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False)
    return GPT2LMHeadModel(config), _tokens(512, config.vocab_size)


def bert_base() -> tuple[nn.Module, dict[str, Tensor]]:
    """BERT-base (110 M parameters) of Transformers as a masked language model, on 128 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig()
    return BertForMaskedLM(config), _tokens(128, config.vocab_size)


def unet() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A U-Net of the original's size (31 M parameters) on images of 256 x 256."""
    return train_unet.build_model(width=64, levels=5), train_unet.build_sample(image_size=256)


def lstm() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A four-layer LSTM (34 M parameters in its layers) on 256 tokens."""
    model = train_lstm.build_model(vocabulary=32000, width=1024, layers=4)
    return model, train_lstm.build_sample(tokens=256, vocabulary=32000)


def _timm(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    import timm

    model: nn.Module = timm.create_model(name)
    return model, (torch.randn(4, 3, 224, 224), torch.randint(1000, (4,)))


def _tokens(length: int, vocabulary: int) -> dict[str, Tensor]:
    input_ids = torch.randint(vocabulary, (4, length))
    return {"input_ids": input_ids, "labels": input_ids.clone()}
