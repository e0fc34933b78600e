"""The set-ups that ``bench_setups.py`` judges: models as people train them, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# Kinds of set-ups whose steps differ, so that one training that survives proves little.
VARYING = (
    "wav2vec 2.0",
    "Trainer, varying lengths",
    "TRL SFT",
    "Lightning",
    "loader, varying lengths",
)
ORDERS = 4


@dataclass(frozen=True)
class Setup:
    """One row of the benchmark.

    Attributes:
        name: of the row.
        kind: of set-up.
        file: in ``setups/``, with a function ``target`` and its own loop.
        gib: the device's memory on CUDA; on the CPU the limit.
        arguments: of the target.
        in_bf16: whether it trains under autocast.
        device: "cuda" or "cpu".
    """

    name: str
    kind: str
    file: str
    gib: float
    arguments: Mapping[str, str | int | float] = field(default_factory=lambda: MappingProxyType({}))
    in_bf16: bool = False
    device: str = "cuda"

    @property
    def orders(self) -> int:
        """How many orders of its data, or draws of its model, the loop is judged with."""
        return ORDERS if self.kind in VARYING else 1


def _image(name: str, gib: int, model: str, *, in_bf16: bool = False, size: int = 224) -> Setup:
    kind = "torchvision" if model.startswith("torchvision") else "timm CNN"
    kind = "timm ViT" if "vit" in model or "swin" in model else kind
    arguments = {"model": model, "image_size": size}
    return Setup(f"{name}-{gib}", kind, "images.py", gib, arguments, in_bf16)


def _text(
    model: str, kind: str, gib: int, *, in_bf16: bool = False, **sizes: str | int | float
) -> Setup:
    arguments = {"model": model, **sizes}
    return Setup(f"{model}-{gib}", kind, "transformers_models.py", gib, arguments, in_bf16)


SETUPS = (
    _image("resnet50", 24, "timm/resnet50"),
    _image("efficientnet", 80, "timm/efficientnet_b0", in_bf16=True),
    _image("convnext", 24, "timm/convnext_tiny", in_bf16=True),
    _image("vit", 24, "timm/vit_small_patch16_224", in_bf16=True),
    _image("vit", 80, "timm/vit_base_patch16_224"),
    _image("swin", 80, "timm/swin_tiny_patch4_window7_224", in_bf16=True),
    _image("mobilenet", 24, "torchvision/mobilenet_v3_large"),
    _image("densenet", 80, "torchvision/densenet121"),
    _text("bert", "encoder", 24),
    _text("bert", "encoder", 80, in_bf16=True, length=512),
    _text("gpt2", "decoder", 24),
    _text("gpt2", "decoder", 80, in_bf16=True),
    _text("llama", "decoder with checkpointing", 24, in_bf16=True, layers=8),
    _text("llama", "decoder with checkpointing", 80, layers=8, width=2048),
    _text("qwen", "decoder", 24),
    _text("qwen", "decoder", 80, in_bf16=True),
    _text("t5", "encoder-decoder", 24),
    _text("bart", "encoder-decoder", 80, in_bf16=True),
    _text("clip", "CLIP", 24),
    _text("clip", "CLIP", 80, in_bf16=True),
    _text("wav2vec2", "wav2vec 2.0", 24),
    _text("wav2vec2", "wav2vec 2.0", 80, in_bf16=True),
    _text("whisper", "Whisper", 80),
    Setup("latent-24", "diffusers U-Net", "diffusion.py", 24, in_bf16=True),
    Setup("latent-80", "diffusers U-Net", "diffusion.py", 80),
    Setup("pixels-24", "diffusers U-Net", "diffusion.py", 24, {"model": "pixels"}),
    Setup("lora-24", "PEFT LoRA", "lora.py", 24),
    Setup("lora-80", "PEFT LoRA", "lora.py", 80, {"layers": 8, "width": 2048}),
    Setup("dcgan-24", "DCGAN", "gan.py", 24),
    Setup("dcgan-80", "DCGAN", "gan.py", 80),
    Setup("lstm-24", "LSTM", "recurrent.py", 24),
    Setup("lstm-80", "LSTM", "recurrent.py", 80, {"width": 1024}),
    Setup("fcn-24", "segmentation", "segmentation.py", 24),
    Setup(
        "deeplab-80",
        "segmentation",
        "segmentation.py",
        80,
        {"model": "deeplabv3_mobilenet_v3_large"},
        in_bf16=True,
    ),
    Setup("trainer-bert-24", "Trainer, varying lengths", "trainer.py", 24),
    Setup("trainer-bert-80", "Trainer, varying lengths", "trainer.py", 80, {"skew": 1.0}),
    Setup("trainer-gpt2-80", "Trainer, varying lengths", "trainer.py", 80, {"model": "gpt2"}),
    Setup("sft-24", "TRL SFT", "sft.py", 24),
    Setup("lightning-24", "Lightning", "lightning_text.py", 24),
    Setup("lightning-80", "Lightning", "lightning_text.py", 80, {"layers": 6}),
    Setup("varying-bert-24", "loader, varying lengths", "varying_lengths.py", 24),
    Setup(
        "varying-gpt2-80",
        "loader, varying lengths",
        "varying_lengths.py",
        80,
        {"model": "gpt2"},
    ),
    *(
        Setup(f"{family}-{gib}", "bundled", "bundled.py", gib, {"family": family}, device="cpu")
        for gib in (0.75, 1.5)
        for family in ("mlp", "resnet", "vit", "gpt", "lstm", "unet")
    ),
)
