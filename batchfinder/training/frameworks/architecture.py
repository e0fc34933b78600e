"""Build the model that a configuration of transformers describes, and a batch for it."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchfinder.errors import TargetError, UsageError
from batchfinder.training.frameworks import ATTENTION
from batchfinder.training.frameworks.quantization import imported
from batchfinder.training.user_module import PREFIX

TASKS = {
    "CausalLM": "CAUSAL_LM",
    "ImageTextToText": None,
    "Seq2SeqLM": "SEQ_2_SEQ_LM",
    "MaskedLM": None,
    "SequenceClassification": "SEQ_CLS",
}
"""The tasks of transformers, and their names in PEFT. A model without a name gets the first."""
DEFAULT_SEQ = 2048  # tokens in each example, if the model has positions for that many
DEFAULT_IMAGE = 448  # pixels on each side, for models that take images of any size
_OWN_FUNCTION = "Try FILE.py:FUNCTION with a function that returns (model, sample)."
# What a model's code raises for a configuration that it cannot be built from. No RuntimeError: the
# device may be full.
_UNBUILDABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
)


def built(config: str, dtype: torch.dtype, attention: str) -> tuple[Any, str]:
    """Build the model named in a configuration, else the first one that transformers has for it.

    Returns:
        The model, and its task: one of :data:`TASKS`.
    """
    transformers = imported("transformers")
    known = _read(config)
    known.use_cache = False
    if attention == "flash":
        if torch.__version__ < "2.5" or not hasattr(transformers, "AttentionMaskInterface"):
            raise UsageError(
                "--attention flash needs PyTorch 2.5 and transformers 4.53, or newer. These are "
                f"{torch.__version__} and {transformers.__version__}. Try --attention sdpa."
            )
        name = ATTENTION[attention]
        transformers.AttentionInterface.register(name, _flash_attention)
        transformers.AttentionMaskInterface.register(name, lambda *_, **__: None)
    # Transformers 4.44 has none for images.
    offered = [task for task in TASKS if hasattr(transformers, f"AutoModelFor{task}")]
    autos = {task: getattr(transformers, f"AutoModelFor{task}") for task in offered}
    of_dtype = "torch_dtype" if "torch_dtype" in vars(known) else "dtype"  # transformers 4.56
    able = [task for task, auto in autos.items() if type(known) in auto._model_mapping]
    named = [task for task in able if _is_named(known, autos[task]._model_mapping[type(known)])]
    task = next(iter([*named, *able, *TASKS]))
    try:
        model = autos[task].from_config(
            known, **{of_dtype: dtype}, attn_implementation=ATTENTION.get(attention)
        )
    except _UNBUILDABLE as error:
        hint = _OWN_FUNCTION
        if "attn_implementation" in str(error):
            reason, hint = f"it has no attention kernel for {attention}.", "Try --attention eager."
        else:
            frames = traceback.extract_tb(error.__traceback__)
            place = next((at for at in reversed(frames) if "modeling_" in at.filename), frames[-1])
            text = str(error).strip().partition("\n")[0]
            reason = f"{type(error).__name__}: {text} ({place.filename}:{place.lineno})."
        raise TargetError(f"no language model from {config}: {reason} {hint}") from error
    return model, task


def example(model: Any, task: str, seq: int, image_size: int) -> dict[str, Any]:
    """Return a batch of one example: text, and an image if the model reads images.

    A length (``seq``, which includes the image's tokens) of 0 stands for :data:`DEFAULT_SEQ`, or as
    many tokens as the model has positions for; an image size of 0 for what the configuration says.
    """
    most = _positions(model)
    seq = seq or min(DEFAULT_SEQ, most or DEFAULT_SEQ)
    if most is not None and seq > most:
        raise UsageError(f"the model has positions for {most} tokens only. Try --seq {most}.")
    ids = torch.zeros(1, seq, dtype=torch.int64, device="cpu")
    if task == "SequenceClassification":
        is_class = model.config.num_labels > 1
        labels = torch.zeros(1, dtype=torch.int64 if is_class else torch.float32, device="cpu")
        return {"input_ids": ids, "labels": labels}
    images, tokens = _image(model, image_size)
    if tokens >= seq:
        raise UsageError(
            f"the image alone has {tokens} tokens, --seq {seq} includes them. Try --seq "
            f"{2 * tokens}, or --arg image_size=PIXELS for another image."
        )
    if images:
        ids[:, :tokens] = model.config.image_token_id
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            images["mm_token_type_ids"] = (torch.arange(seq, device="cpu") < tokens).long()[None]
    return {"input_ids": ids, "labels": ids, **images}


def beyond_positions(model: Any, batch: dict[str, Any]) -> list[str]:
    """Return a remark if a batch has more tokens than the configuration states positions for."""
    seq, most = next(iter(batch.values())).shape[1], _stated_positions(model)
    if not 0 < most < seq:
        return []
    return [
        f"{seq} tokens are more than the configuration's max_position_embeddings, {most}. Such "
        "lengths train, and this is their memory, but the model may not be made for them"
    ]


def _read(config: str) -> Any:
    path = Path(config).expanduser()
    place = path.parent if path.is_file() and path.suffix != ".json" else path
    # No name on the hub looks so.
    is_local = path.suffix == ".json" or config.startswith(("/", ".", "~"))
    if not config or (is_local and not path.exists()):
        problem = f"there is no file or folder {config}" if config else f"{PREFIX} names no model"
        raise TargetError(f"{problem}. Try {PREFIX}FOLDER with a config.json in it.")
    try:
        return imported("transformers").AutoConfig.from_pretrained(
            str(place if place.exists() else config)
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        if "model type" in reason:  # Transformers has none of this name
            raise TargetError(
                f"no model from {config}: {reason.partition('. ')[0]}. A newer version may know it."
                " Try pip install --upgrade transformers."
            ) from error
        raise TargetError(
            f"there is no configuration {config} ({reason}). Try {PREFIX}FOLDER with the model's "
            "config.json in it."
        ) from error


def _is_named(config: Any, kinds: Any) -> bool:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return any(kind.__name__ in (config.architectures or ()) for kind in kinds)


def _positions(model: Any) -> int | None:
    """Return the most tokens that a table of positions has rows for; None without a table."""
    most = _stated_positions(model)
    words = model.get_input_embeddings()
    for part in model.modules() if most else ():
        if isinstance(part, nn.Embedding) and part is not words:
            first = 0 if part.padding_idx is None else part.padding_idx + 1
            if 0 <= part.num_embeddings - most <= 2:  # some tables start with unused rows
                return min(most, part.num_embeddings - first)
    return None


def _stated_positions(model: Any) -> int:
    """Return the number of positions in a configuration; 0 if it states none."""
    of_text = getattr(model.config, "get_text_config", lambda: model.config)  # transformers 4.45
    return getattr(of_text(), "max_position_embeddings", None) or 0


def _image(model: Any, size: int) -> tuple[dict[str, Tensor], int]:
    """Return an image as the model takes it, and its number of tokens; none for a text model."""
    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        return {}, 0
    size = size or getattr(vision, "image_size", None) or DEFAULT_IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
    merged = getattr(vision, "spatial_merge_size", None)
    try:
        if merged is None:
            pixels = torch.zeros(1, channels, height, width, device="cpu")
            if hasattr(model.config, "spatial_merge_size"):  # Pixtral's tower, as Mistral 3 has it
                sizes = torch.tensor([[height, width]], device="cpu")
                side = vision.patch_size * model.config.spatial_merge_size
                tokens = (height // side) * (width // side)
                return {"pixel_values": pixels, "image_sizes": sizes}, tokens
            where = model.get_input_embeddings().weight
            with torch.no_grad():
                seen = model.get_image_features(pixels.to(where.device, where.dtype))
            seen = getattr(seen, "pooler_output", seen)
            tokens = sum(part.shape[:-1].numel() for part in seen)
            return {"pixel_values": pixels}, tokens
        rows, columns = (side // vision.patch_size // merged * merged for side in (height, width))
        numbers = channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.zeros(rows * columns, numbers, device="cpu")
        grid = torch.tensor([[1, rows, columns]], device="cpu")
        return {"pixel_values": pixels, "image_grid_thw": grid}, rows * columns // merged**2
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise TargetError(
            f"the images of {type(model).__name__} need more than a size ({error}). {_OWN_FUNCTION}"
        ) from error


def _flash_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run PyTorch's copy of FlashAttention, with no mask and without repeating grouped keys."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, scale=scaling, is_causal=is_causal, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None
