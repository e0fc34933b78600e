"""A language model made of an LSTM."""

from __future__ import annotations

import setup_loop
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 10_000
TOKENS = 64
Sample = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Embedding, LSTM, and a layer that scores each word."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        """Return the scores, with the words' dimension second as the loss expects it."""
        states, _ = self.lstm(self.embedding(words))
        scores: Tensor = self.head(states)
        return scores.transpose(1, 2)


def target(width: int = 512, layers: int = 2) -> tuple[nn.Module, Sample]:
    """Return the model and one batch."""
    return LanguageModel(width, layers), make_batch(2)


def make_batch(batch_size: int) -> Sample:
    """Return words and the next words."""
    words = torch.ones(batch_size, TOKENS, dtype=torch.long)
    return words, words.clone()


if __name__ == "__main__":
    device = setup_loop.device
    model, optimizer = setup_loop.with_adamw(target)
    for words, next_words in (make_batch(setup_loop.batch_size) for _ in range(setup_loop.steps)):
        words, next_words = words.to(device), next_words.to(device)
        with setup_loop.autocast():
            scores = model(words)
            loss = F.cross_entropy(scores, next_words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
