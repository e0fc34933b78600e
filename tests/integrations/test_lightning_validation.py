from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.test_lightning_finder import DATA, Module, fitted, pl, trainer_with
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from batchfinder.errors import NothingFitsError
from batchfinder.integrations.lightning import BatchSizeFinder
from batchfinder.probing.devices.cpu import CpuDevice
from batchfinder.units import MIB

pytestmark = pytest.mark.filterwarnings("ignore")
VALIDATED = {"limit_val_batches": 1.0, "num_sanity_val_steps": 0}


class OwnValidation(Module):
    """A module whose validation has two loaders with batch sizes of their own."""

    def __init__(self, fits: int, log: Path) -> None:
        super().__init__(fits=fits)
        self.log_file = log  # a search restores what is in memory

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        with self.log_file.open("a") as file:
            print(len(batch[0]), dataloader_idx, file=file)
        super().validation_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return [DataLoader(DATA, batch_size=5), DataLoader(DATA, batch_size=30)]


def test_a_validation_with_a_batch_size_of_its_own_is_part_of_the_search(tmp_path: Path) -> None:
    log = tmp_path / "batches"
    module = OwnValidation(fits=35, log=log)
    fitted(module, finder := BatchSizeFinder("binsearch", margin=0), max_steps=0, **VALIDATED)
    assert finder.optimal_batch_size == 35
    assert {*log.read_text().splitlines()} == {"30 1"}
    says = r"because of the validation. Try a smaller batch_size in val_dataloader\(\)"
    with pytest.raises(NothingFitsError, match=says):
        fitted(OwnValidation(fits=20, log=log), BatchSizeFinder(), **VALIDATED)
    with pytest.raises(torch.OutOfMemoryError):  # without a search, after the first steps
        fitted(OwnValidation(fits=20, log=log), **VALIDATED)


def test_what_a_validation_keeps_is_dropped_at_its_end(tmp_path: Path) -> None:
    class Keeping(OwnValidation):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.kept: list[Tensor] = []

        def validation_step(self, batch: list[Tensor], *index: int) -> None:
            self.kept.append(self.layer(batch[0]))
            with self.log_file.open("a") as file:
                print(len(self.kept), file=file)

        def on_validation_epoch_end(self) -> None:
            self.kept.clear()

    module = Keeping(fits=35, log=tmp_path / "kept")
    fitted(module, BatchSizeFinder("binsearch", margin=0), max_steps=0, **VALIDATED)
    assert {*module.log_file.read_text().split()} == {"1", "2"}
    assert module.kept == []


@pytest.mark.parametrize(("batches", "fits"), [(1000, False), (8, True), (1.0, True)])
def test_what_a_whole_validation_keeps_counts(batches: float, fits: bool) -> None:
    class Keeping(Module):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.kept.append(torch.ones(len(batch[0]), 4 * MIB, dtype=torch.uint8))

        def val_dataloader(self) -> Any:
            data = TensorDataset(torch.ones(1000 if isinstance(batches, int) else 8, 6))
            return DataLoader(data, batch_size=2)

    module = Keeping()
    module.kept = []
    limits = {**VALIDATED, "limit_val_batches": batches}
    limit = CpuDevice().held_bytes() + 600 * MIB
    finder = BatchSizeFinder(max_val=4, memory_limit=limit)
    if fits:
        fitted(module, finder, max_steps=0, **limits)
        assert module.kept == []
    else:
        with pytest.raises(NothingFitsError, match="its results on the host"):
            fitted(module, finder, **limits)


class JoinedValidation(Module):
    """A module whose validation gets a batch of each loader at once, without an index."""

    def validation_step(self, batch: dict[str, list[Tensor]]) -> None:  # type: ignore[override]
        super().validation_step([torch.cat([part[0] for part in batch.values()])], 0)

    def val_dataloader(self) -> Any:
        loaders = {"a": DataLoader(DATA, batch_size=5), "b": DataLoader(DATA, batch_size=30)}
        return pl.utilities.CombinedLoader(loaders, "min_size")


class WithoutIndex(Module):
    """A module that validates sparse batches, and whose step takes nothing but a batch."""

    def validation_step(self, batch: Tensor) -> None:  # type: ignore[override]
        super().validation_step([batch.to_dense()], 0)

    def val_dataloader(self) -> Any:
        def collate(rows: list[Any]) -> Tensor:
            return torch.stack([row for (row,) in rows]).to_sparse()

        return DataLoader(DATA, batch_size=30, collate_fn=collate)


@pytest.mark.parametrize("module", [JoinedValidation, WithoutIndex])
def test_the_step_of_a_validation_is_called_as_its_trainer_calls_it(module: Any) -> None:
    fitted(module(fits=40), finder := BatchSizeFinder("binsearch", margin=0), **VALIDATED)
    assert finder.optimal_batch_size == 40


def test_a_validation_loader_passed_to_fit_follows_no_attribute() -> None:
    says = "because of the validation"
    finder, module = BatchSizeFinder(), Module(batch_size=8, fits=6)
    trainer = trainer_with(finder, **VALIDATED)
    empty = DataLoader(TensorDataset(torch.empty(0, 6)), 8)
    with pytest.raises(NothingFitsError, match=says):
        trainer.fit(module, DataLoader(DATA, 8), [DataLoader(DATA, 8), empty])


def test_a_validation_that_a_hook_prepares_is_left_out(tmp_path: Path) -> None:
    class Prepared(OwnValidation):
        def on_validation_epoch_start(self) -> None:
            self.outputs: list[Tensor] = []

        def validation_step(self, batch: list[Tensor], *index: int) -> None:
            self.outputs.append(self.layer(batch[0]))

    module = Prepared(fits=40, log=tmp_path / "unused")
    with pytest.warns(UserWarning, match="does not run on_validation_epoch_start"):
        fitted(module, BatchSizeFinder("binsearch", margin=0), **VALIDATED)
    assert module.batch_size == 40
    assert len(module.outputs) == 12
