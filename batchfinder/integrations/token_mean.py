"""How many tokens the loss of a Transformers model is the mean of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from batchfinder.training.parallel import unwrapped
from batchfinder.training.setup import LossFunction

# The loss leaves out tokens with this label.
IGNORED = -100
# What a model's ``loss_type`` says of the loss: the label of a token is that of the one before it,
# or its own. None stands for a model without a type, such as GPT-2, whose loss is the first kind's.
OF_NEXT_TOKENS = (None, "ForCausalLM", "ForConditionalGeneration")
OF_TOKENS = ("ForMaskedLM", "ForTokenClassification")


def tokens_in(model: nn.Module, loss_fn: LossFunction | None, batch: Any) -> int:
    """Return the tokens of a batch whose loss counts; 0 if it is not the model's mean over tokens.

    Source: ``loss/loss_utils.py`` of Transformers. Encoder-decoder models shift their inputs
    instead of the labels.
    """
    model = unwrapped(model)
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    is_own = loss_fn is None and hasattr(model, "loss_type")
    if not is_own or not isinstance(labels, Tensor) or labels.dim() != 2:
        return 0
    kind, config = model.loss_type, getattr(model, "config", None)
    if kind in OF_NEXT_TOKENS:
        if not getattr(config, "is_encoder_decoder", False):
            labels = labels[:, 1:]
    elif kind not in OF_TOKENS:
        return 0
    return int((labels != IGNORED).sum())
