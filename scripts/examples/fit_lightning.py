"""Let Lightning train with the largest batch size: one callback.

Try it:  python scripts/examples/fit_lightning.py
On several ranks:  torchrun --nproc-per-node 2 scripts/examples/fit_lightning.py
Or from outside:
  batchfinder run -- python scripts/examples/fit_lightning.py --batch-size {batch_size}
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from batchfinder.integrations.lightning import BatchSizeFinder


class Classifier(pl.LightningModule):
    """A small network with its data."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.data = TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader:
        """Return the data in batches of ``batch_size``, which the callback sets."""
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)


def main() -> None:
    """Train for one epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, help="default: the largest that trains")
    batch_size = parser.parse_args().batch_size

    model = Classifier(batch_size or 1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        max_epochs=1,
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        callbacks=[] if batch_size else [BatchSizeFinder(mode="binsearch")],
    )
    trainer.fit(model)
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["loss"]
        print(f"trained with batch size {model.batch_size}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
