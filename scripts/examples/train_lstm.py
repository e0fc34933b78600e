"""Classify sequences of tokens with a two-layer LSTM.

Try it: batchfinder find scripts/examples/train_lstm.py:build_model --memory-limit 2GiB
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 2


class Classifier(nn.Module):
    """Token embeddings, an LSTM, and a linear head on the mean of its outputs."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """From token ids (batch, tokens) to logits (batch, classes)."""
        outputs, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(outputs.mean(dim=1))
        return logits


def build_model(vocabulary: int = 1000, width: int = 64, layers: int = 2) -> Classifier:
    """The model to train."""
    return Classifier(vocabulary, width, layers)


def build_sample(
    batch_size: int = 4, tokens: int = 64, vocabulary: int = 1000
) -> tuple[Tensor, Tensor]:
    """One batch as the DataLoader yields it: token ids and a label for each sequence."""
    return torch.randint(vocabulary, (batch_size, tokens)), torch.randint(CLASSES, (batch_size,))
