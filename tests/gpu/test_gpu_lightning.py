"""Lightning trains in the memory in which the answer was proved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.models import needs_cuda
from torch import nn

from batchfinder.units import MIB

pytestmark = [*needs_cuda, pytest.mark.filterwarnings("ignore")]  # Lightning gives many


def test_a_training_begins_without_what_the_sanity_check_cached() -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")
    from batchfinder.integrations.lightning import BatchSizeFinder

    cached: dict[str, int] = {}

    def note(moment: str) -> None:
        cached[moment] = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.batch_size = nn.Linear(8, 8), 2

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).sum()  # type: ignore[no-any-return]

        def validation_step(self, batch: torch.Tensor) -> None:
            self.layer(batch).new_empty(256 * MIB)  # much more than a step of the training
            note("validation")

        def loader(self) -> Any:
            return torch.utils.data.DataLoader(torch.zeros(64, 8), self.batch_size)  # type: ignore[arg-type]

        train_dataloader = val_dataloader = loader

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

        def on_train_start(self) -> None:
            note("training")

    trainer = lightning.Trainer(
        max_steps=1,
        accelerator="cuda",
        devices=1,
        callbacks=[BatchSizeFinder(max_val=4)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module())
    assert cached["training"] < 32 * MIB < 1024 * MIB <= cached["validation"]
