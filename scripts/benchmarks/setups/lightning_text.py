"""A LightningModule that trains an encoder, by Lightning's own Trainer."""

from __future__ import annotations

import logging
from typing import Any

import pytorch_lightning
import setup_loop
import torch
from text_data import Texts, drawn, of_texts
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification


class Classifier(pytorch_lightning.LightningModule):
    """A classifier of texts.

    Args:
        layers: of its encoder.
    """

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.net = DistilBertForSequenceClassification(DistilBertConfig(n_layers=layers))

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self.net(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def target(layers: int = 4) -> Any:
    """Return the module and batches by the number of the step."""
    from batchfinder import TrainingSetup

    return TrainingSetup(Classifier(layers), make_batch=drawn(of_texts))


def loader(batch_size: int = 2, layers: int = 4) -> DataLoader[Any]:
    """Return the batches of an epoch."""
    return DataLoader(Texts(), batch_size, shuffle=True, collate_fn=of_texts)


if __name__ == "__main__":
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.manual_seed(setup_loop.seed)
    module = setup_loop.kept(Classifier)
    pytorch_lightning.Trainer(
        accelerator="gpu" if setup_loop.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if setup_loop.in_bf16 else "32-true",
        max_steps=setup_loop.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader(setup_loop.batch_size))
