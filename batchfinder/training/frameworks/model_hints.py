"""Make a sample from the example inputs that models of well-known libraries carry."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from batchfinder.training.data.input_spec import parse_input_spec


def sample_from_model(model: nn.Module) -> Any:
    """Make a small batch from the example input that a model carries; None if it carries none.

    The function reads, in this order, ``example_input_array`` (Lightning), ``dummy_inputs``
    (Transformers; with labels if the model computes a loss from them), and ``pretrained_cfg`` or
    ``default_cfg`` (timm; images and class labels). It imports none of these libraries.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> sample_from_model(model) is None
        True
        >>> model.example_input_array = torch.zeros(1, 4)
        >>> tuple(sample_from_model(model).shape)
        (1, 4)
    """
    for read in (_from_lightning, _from_transformers, _from_timm):
        sample = read(model)
        if sample is not None:
            return sample
    return None


def _from_lightning(model: nn.Module) -> Any:
    """Return the example input. Lightning passes a tuple as positional arguments, a dict by name.

    https://lightning.ai/docs/pytorch/stable/common/lightning_module.html#example-input-array
    """
    example = getattr(model, "example_input_array", None)
    if not isinstance(example, tuple):
        return example
    if len(example) == 1:
        return example[0]
    # As a batch, a tuple of two would mean (inputs, targets). A dict makes all of them inputs.
    names = list(_forward_parameters(model))
    return dict(zip(names, example, strict=False)) if len(names) >= len(example) else example


def _from_transformers(model: nn.Module) -> Any:
    dummy_inputs = getattr(model, "dummy_inputs", None)
    if not isinstance(dummy_inputs, Mapping):
        return None
    # Vision and audio models inherit dummy token ids, which they cannot use.
    if getattr(model, "main_input_name", "input_ids") not in dummy_inputs:
        return None
    parameters = _forward_parameters(model)
    sample = {name: value for name, value in dummy_inputs.items() if name in parameters}
    tokens = sample.get("decoder_input_ids", sample.get("input_ids"))
    if tokens is not None and "labels" in parameters:
        sample.setdefault("labels", _labels(model, tokens))
    return sample or None


def _labels(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return labels of the kind that the model's task needs. Language models get their own tokens.

    https://huggingface.co/docs/transformers/glossary#labels
    """
    task = type(model).__name__
    if "SequenceClassification" in task:
        # With a single label the model does regression.
        is_regression = getattr(getattr(model, "config", None), "num_labels", None) == 1
        return torch.zeros(
            tokens.shape[0],
            dtype=torch.float32 if is_regression else torch.int64,
            device=tokens.device,
        )
    if "TokenClassification" in task:
        return torch.zeros_like(tokens)
    return tokens.clone()


def _from_timm(model: nn.Module) -> Any:
    """Return images of the size that a model was trained for, with one class label each.

    https://huggingface.co/docs/timm/reference/models
    """
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if not isinstance(config, Mapping) or "input_size" not in config:
        return None
    image = f"float32[{','.join(map(str, config['input_size']))}]"
    num_classes = getattr(model, "num_classes", config.get("num_classes"))
    # A model without classes returns features, which have no labels.
    return parse_input_spec(f"{image} int64[]:{num_classes}" if num_classes else image)


def _forward_parameters(model: nn.Module) -> list[str]:
    """Return the names by which inputs can be passed to ``forward``."""
    return [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
