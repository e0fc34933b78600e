"""Texts of varying length, as tokenizers leave them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

# Tokens of the shortest and of the longest text.
SHORTEST, LONGEST = 16, 512


class Texts(Dataset[dict[str, list[int]]]):
    """Token ids of texts; most are much shorter than the longest.

    Args:
        count: of texts.
        skew: 1: each length is as likely; larger: long texts are rarer.
    """

    def __init__(self, count: int = 20_000, skew: float = 2.0) -> None:
        draw = random.Random(0)
        self.lengths = [
            SHORTEST + round((LONGEST - SHORTEST) * draw.random() ** skew) for _ in range(count)
        ]
        self.lengths[count // 2] = LONGEST

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [1] * self.lengths[index]}


def of_tokens(texts: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad to the longest of a batch; the labels are the tokens themselves."""
    lengths = [len(text["input_ids"]) for text in texts]
    mask = torch.zeros(len(texts), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return {
        "input_ids": mask.clone(),
        "attention_mask": mask,
        "labels": mask.masked_fill(mask == 0, -100),
    }


def of_texts(texts: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad to the longest of a batch; each text has one label."""
    return {**of_tokens(texts), "labels": torch.zeros(len(texts), dtype=torch.long)}


def drawn(collate: Callable[[list[Any]], Any]) -> Callable[[int, int], Any]:
    """Return ``make_batch(batch_size, step)``: the longest texts first, then texts at random."""
    texts = Texts()

    def make_batch(batch_size: int, step: int) -> Any:
        if step == 0:
            return collate([{"input_ids": [1] * LONGEST}] * batch_size)
        draw = random.Random(step)
        return collate([texts[draw.randrange(len(texts))] for _ in range(batch_size)])

    return make_batch
