from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from batchfinder.training.frameworks.model_hints import sample_from_model
from batchfinder.training.sample import BatchMaker


class Two(nn.Module):
    """Takes two inputs, as Lightning modules may."""

    example_input_array: Any = None

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


def test_model_without_hints() -> None:
    assert sample_from_model(nn.Linear(2, 1)) is None
    assert sample_from_model(Two()) is None


def test_example_input_array_as_a_tensor_and_as_keywords() -> None:
    model = Two()
    model.example_input_array = torch.ones(3, 2)
    assert sample_from_model(model) is model.example_input_array
    model.example_input_array = {"left": torch.ones(3, 2), "right": torch.ones(3, 2)}
    assert sample_from_model(model) is model.example_input_array


def test_example_input_array_as_a_tuple_means_positional_arguments() -> None:
    model = Two()
    left, right = torch.ones(3, 2), torch.zeros(3, 2)
    model.example_input_array = (left, right)
    sample = sample_from_model(model)
    assert sample == {"left": left, "right": right}
    assert torch.equal(model(**sample), left)
    model.example_input_array = (left,)
    assert sample_from_model(model) is left


def test_tuple_for_a_forward_without_names_stays_a_tuple() -> None:
    class Star(nn.Module):
        example_input_array = (torch.ones(3), torch.ones(3))

        def forward(self, *inputs: Tensor) -> Tensor:
            return torch.stack(inputs)

    assert sample_from_model(Star()) is Star.example_input_array


class TimmLike(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.pretrained_cfg = {"input_size": (3, 32, 48), "num_classes": 1000}
        self.default_cfg = {"input_size": (1, 1, 1)}


def test_images_and_labels_for_timm() -> None:
    images, labels = sample_from_model(TimmLike(num_classes=7))
    assert (images.shape, images.dtype) == ((2, 3, 32, 48), torch.float32)
    assert (labels.shape, labels.dtype) == ((2,), torch.int64)
    assert 0 <= labels.min() <= labels.max() < 7


def test_images_only_for_timm_without_classes() -> None:
    assert sample_from_model(TimmLike(num_classes=0)).shape == (2, 3, 32, 48)


def test_older_timm_has_default_cfg() -> None:
    model = nn.Linear(1, 1)
    model.default_cfg = {"input_size": (3, 8, 8), "num_classes": 4}  # type: ignore[assignment]
    images, labels = sample_from_model(model)
    assert images.shape == (2, 3, 8, 8)
    assert labels.max() < 4


def tiny(name: str, **more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, dict[str, Any]] = {
        "GPT2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 16},
        "Bert": {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 8,
            "vocab_size": 16,
        },
        "T5": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
        "ViT": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    }
    family = next(family for family in sizes if name.startswith(family))
    extra = {"decoder_start_token_id": 0, "vocab_size": 16} if family == "T5" else {}
    config = getattr(transformers, f"{family}Config")(**sizes[family], **extra, **more)
    model = getattr(transformers, name)(config)
    assert isinstance(model, nn.Module)
    return model


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("GPT2LMHeadModel", {}),
        ("BertForMaskedLM", {}),
        ("BertForSequenceClassification", {"num_labels": 3}),
        ("BertForSequenceClassification", {"num_labels": 1}),
        ("BertForTokenClassification", {"num_labels": 3}),
        ("T5ForConditionalGeneration", {}),
    ],
)
def test_transformers_models_get_labels_that_give_a_loss(name: str, more: dict[str, Any]) -> None:
    model = tiny(name, **more)
    batch = BatchMaker(sample_from_model(model)).make(5)
    loss = model(**batch).loss
    loss.backward()
    assert loss.shape == ()
    assert loss.isfinite()


def test_causal_language_models_learn_their_own_tokens() -> None:
    sample = sample_from_model(tiny("GPT2LMHeadModel"))
    assert torch.equal(sample["labels"], sample["input_ids"])
    assert sample["labels"] is not sample["input_ids"]


def test_bare_models_get_no_labels_and_only_what_they_take() -> None:
    assert list(sample_from_model(tiny("GPT2Model"))) == ["input_ids"]
    assert "decoder_input_ids" not in sample_from_model(tiny("T5EncoderModel"))


def test_vision_models_of_transformers_carry_no_usable_hint() -> None:
    assert sample_from_model(tiny("ViTForImageClassification")) is None
