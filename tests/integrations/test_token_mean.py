"""A Transformers model's loss is a mean over tokens, so parts of padded texts count by theirs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from batchfinder import OOMGuard

VOCABULARY = 11


class Texts(nn.Module):
    """A language model with the loss that Transformers computes for its ``loss_type``."""

    def __init__(self, loss_type: str | None, *, is_encoder_decoder: bool) -> None:
        super().__init__()
        self.loss_type = loss_type
        self.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
        self.is_next = loss_type in (None, "ForCausalLM") and not is_encoder_decoder
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY).double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        scores = self.embedding(input_ids)
        if self.is_next:
            scores, labels = scores[:, :-1], labels[:, 1:]
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss)


def padded(*lengths: int) -> dict[str, Tensor]:
    input_ids = torch.arange(len(lengths) * 9).reshape(len(lengths), 9) % VOCABULARY
    is_padding = torch.arange(9)[None] >= torch.tensor(lengths)[:, None]
    return {"input_ids": input_ids, "labels": input_ids.masked_fill(is_padding, -100)}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("loss_type", "is_encoder_decoder"),
    [
        ("ForCausalLM", False),
        (None, False),
        ("ForMaskedLM", False),
        ("ForTokenClassification", False),
        ("ForConditionalGeneration", True),
    ],
)
@pytest.mark.parametrize("lengths", [(9, 2, 5, 3, 9, 4), (9, 8, 0, 1, 0, 1)])
def test_gradients_are_those_of_the_whole_batch(
    lengths: tuple[int, ...], loss_type: str | None, is_encoder_decoder: bool, size: int
) -> None:
    """Also where a part has no token that counts, whose own mean is not a number."""
    model = Texts(loss_type, is_encoder_decoder=is_encoder_decoder)
    batch, weight = padded(*lengths), model.embedding.weight
    whole = model(**batch).loss
    (gradient,) = torch.autograd.grad(whole, weight)
    loss = OOMGuard(model, torch.optim.SGD([weight], lr=0.1), batch_size=size).backward(batch)
    torch.testing.assert_close(weight.grad, gradient, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(loss, whole.detach())
