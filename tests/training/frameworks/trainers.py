"""Trainers of transformers, as far as a search asks them, and what they train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from batchfinder import TrainingSetup
from batchfinder.training.complete_setup import completed
from batchfinder.training.setup import setup_of

Example = dict[str, list[int]]


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor
    name: str


class Tagger(nn.Module):
    """The least of a model for texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 10)
        self.saves_activations: dict[str, Any] | None = None

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.layer(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return Output(loss, logits, "tags")

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any) -> None:
        self.saves_activations = gradient_checkpointing_kwargs


class Texts:
    """So many texts, of one token each unless one is the longest; notes which are looked at."""

    def __init__(self, size: int, longest_at: int | None = None) -> None:
        self.size, self.longest_at = size, longest_at
        self.seen: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> Example:
        self.seen.append(place)
        length = 1 if self.longest_at is None else 7 if place == self.longest_at else 1 + place % 3
        return {"input_ids": [place % 10] * length, "labels": [1] * length}


def collate(examples: list[Example]) -> dict[str, Tensor]:
    def padded(name: str) -> Tensor:
        longest = max(len(example[name]) for example in examples)
        return torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in examples])

    return {name: padded(name) for name in examples[0]}


class Trainer:
    """The least that a Trainer of transformers has."""

    def __init__(self, dataset: Any = None, collate: Any = collate, **args: Any) -> None:
        self.model: Any = Tagger()
        self.data_collator = collate
        self.args = SimpleNamespace(learning_rate=0.1, **args)
        self.train_dataset: Any = Texts(20) if dataset is None else dataset
        self.eval_dataset = self.train_dataset
        self.optimizer: Any = None
        self.model_wrapped = self.model
        self.batches_seen = 0

    def compute_loss(self, model: Any, inputs: Any) -> Any:
        self.batches_seen += 1
        self.output = model(**inputs)
        return self.output.loss

    def create_optimizer(self) -> Any:
        named = list(self.model.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.1},
            {"params": [p for name, p in named if "bias" in name]},
        ]
        self.optimizer = SGD(groups, lr=self.args.learning_rate, momentum=0.9)
        return self.optimizer

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


def opened(trainer: Any, *given: Any) -> tuple[TrainingSetup, list[str]]:
    return completed(setup_of(trainer, *given))
