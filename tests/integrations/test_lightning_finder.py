from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from batchfinder.errors import NothingFitsError, UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pl: Any = pytest.importorskip("lightning.pytorch")
    from batchfinder.integrations.lightning import BatchSizeFinder

pytestmark = pytest.mark.filterwarnings("ignore")
DATA = TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(1)))


class Module(pl.LightningModule):  # type: ignore[misc]
    """A module that runs out of memory above ``fits`` examples."""

    def __init__(self, batch_size: int | None = 1, fits: int = 10**9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(6, 4), nn.Dropout(), nn.Linear(4, 1))
        self.fits = fits
        self.sizes: list[int] = []
        if batch_size is not None:
            self.batch_size = batch_size

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        self._check(batch)
        loss: Tensor = self.layer(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert not self.training
        self._check(batch)
        self.log("loss", self.layer(batch[0]).mean())

    def _check(self, batch: list[Tensor]) -> None:
        if len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=self.batch_size, shuffle=True)

    val_dataloader = train_dataloader


class Data(pl.LightningDataModule):  # type: ignore[misc]
    def __init__(self, batch_size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=self.hparams.batch_size, shuffle=True)


class TwoOptimizers(Module):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters()) for part in (self.layer[0], self.layer[2])]


def trainer_with(*callbacks: Any, **options: Any) -> Any:
    options = {"max_epochs": 2, "limit_val_batches": 0, "logger": False, **options}
    return pl.Trainer(
        accelerator="cpu",
        callbacks=[*callbacks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fitted(module: Any, *callbacks: Any, data: Any = None, **options: Any) -> Any:
    trainer = trainer_with(*callbacks, **options)
    torch.manual_seed(3)
    trainer.fit(module, data)
    return trainer


def weights(module: nn.Module) -> list[float]:
    return [x for parameter in module.parameters() for x in parameter.flatten().tolist()]


@pytest.mark.parametrize(
    ("holder", "steps"), [("module", 1), ("module", 2), ("datamodule", 1), ("loader", 1)]
)
def test_fit_trains_as_if_the_answer_were_written_by_hand(holder: str, steps: int) -> None:
    def with_size(size: int) -> tuple[Module, Any]:
        if holder == "module":
            return Module(size), None
        if holder == "datamodule":
            return Module(None), Data(size)
        return Module(None), DataLoader(DATA, batch_size=size, shuffle=True)

    finder = BatchSizeFinder(max_val=40)
    module, data = with_size(3)
    trainer = fitted(module, finder, data=data, accumulate_grad_batches=steps)
    assert finder.result is not None
    assert finder.result.batch_size == 40
    assert finder.optimal_batch_size == 32
    assert trainer.train_dataloader.batch_size == 32
    assert trainer.global_step == 4 // steps
    assert module.sizes == [32, 16, 32, 16]  # what the search ran is undone
    expected, data_by_hand = with_size(32)
    fitted(expected, data=data_by_hand, accumulate_grad_batches=steps)
    assert weights(module) == weights(expected)
    if holder == "loader":
        assert data.batch_size == 3


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"mode": "binsearch", "margin": 0.1}, 18),
        ({"mode": "binsearch", "margin": 0.1, "max_val": 15}, 15),
        ({"mode": "power", "init_val": 3}, 12),
        ({"mode": "power", "init_val": 300}, 18),
        ({"mode": "binsearch", "margin": 0.0, "max_trials": 3}, 8),
        ({"max_trials": 0, "init_val": 5}, 5),
    ],
)
def test_the_arguments_of_lightning_s_own(options: dict[str, Any], size: int) -> None:
    module = Module(fits=20)
    fitted(module, finder := BatchSizeFinder(**options), max_epochs=1)
    assert finder.optimal_batch_size == module.batch_size == size


def test_manual_optimization_with_two_optimizers() -> None:
    module = TwoOptimizers(fits=20)
    trainer = fitted(module, finder := BatchSizeFinder("binsearch", margin=0), max_epochs=1)
    assert finder.optimal_batch_size == 20
    assert trainer.global_step == 6


@pytest.mark.parametrize("several", [False, True])
def test_batches_that_vary_confirm_the_answer(tmp_path: Path, several: bool) -> None:
    log = tmp_path / "shapes"  # a search restores what is in memory

    class Texts(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            texts = batch[0] if several else batch
            with log.open("a") as file:
                print(*texts.shape, file=file)
            loss: Tensor = self.layer(texts.sum(1, keepdim=True).expand(-1, 6)).square().mean()
            return loss

        def train_dataloader(self) -> Any:
            data: Any = [torch.ones(1 + place % 5) for place in range(40)]
            loader = DataLoader(data, self.batch_size, collate_fn=padded)
            return [loader, DataLoader(DATA, self.batch_size)] if several else loader

    def padded(texts: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(texts, batch_first=True)

    module = Texts()
    trainer_with(BatchSizeFinder("binsearch", init_val=3, max_trials=1), max_steps=0).fit(module)
    assert module.batch_size == 3
    shapes = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    assert {(3, 5), (3, 3), (3, 4)} <= {*shapes}  # the longest, and others in their order


def test_validation_is_searched_without_gradients() -> None:
    module = Module(fits=20)
    trainer = trainer_with(finder := BatchSizeFinder(), limit_val_batches=1.0)
    trainer.validate(module)
    assert finder.optimal_batch_size == module.batch_size == 16
    assert trainer.val_dataloaders.batch_size == 16
    assert module.training


def test_where_nothing_fits_the_size_stays() -> None:
    module = Module(4, fits=0)
    with pytest.raises(NothingFitsError, match="not even one example fits"):
        fitted(module, BatchSizeFinder())
    assert module.batch_size == 4


def refused(says: str, module: Any, *data: Any) -> None:
    trainer = trainer_with(BatchSizeFinder())
    with pytest.raises(UsageError, match=says):
        trainer.fit(module, *data)


def test_what_has_no_batch_size_to_set_is_refused_before_anything_runs() -> None:
    refused(
        "neither model nor datamodule", Module(None), pl.LightningDataModule.from_datasets(DATA)
    )
    sampler = BatchSampler(SequentialSampler(DATA), 4, drop_last=False)
    refused(
        "batch sampler of its own", Module(), DataLoader(DATA, batch_sampler=OwnSampler(sampler))
    )
    refused("OwnSampler was passed to fit", Module(), OwnSampler(sampler))


class OwnSampler:
    """Yields what another sampler does, without its options."""

    def __init__(self, sampler: BatchSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


def test_a_strategy_that_shards_is_refused() -> None:
    with pytest.raises(UsageError, match=r"object shards the model.*--strategy fsdp"):
        BatchSizeFinder().setup(SimpleNamespace(strategy=object()), Module(), "fit")


@pytest.mark.parametrize("wrong", [{"margin": 1.0}, {"init_val": 0}, {"max_val": 0}])
def test_arguments_without_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        BatchSizeFinder(**wrong)
    with pytest.raises(ValueError, match="mode"):
        BatchSizeFinder("triple")


def test_fast_dev_run_leaves_the_size_as_it_is() -> None:
    module = Module(3)
    fitted(module, finder := BatchSizeFinder(), fast_dev_run=True)
    assert (module.batch_size, finder.optimal_batch_size) == (3, None)


def test_loaders_that_ignore_the_size_are_named() -> None:
    class Fixed(Module):
        def train_dataloader(self) -> Any:
            return DataLoader(DATA, batch_size=4)

    with pytest.warns(UserWarning, match=r"make batches of 4, not of 8. Try batch_size=self.batch"):
        fitted(Fixed(), BatchSizeFinder(max_val=8), max_steps=1)


@pytest.mark.parametrize(
    ("fits", "options", "why"),
    [
        (10**9, {}, "only 48 examples for a rank"),
        (10**9, {"max_val": 8}, "to 8: max_val=8 and max_trials=25 allow no more"),
        (20, {}, "to 16\n"),
    ],
)
def test_the_log_says_what_the_limit_is(
    fits: int, options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        fitted(Module(fits=fits), BatchSizeFinder(**options), max_epochs=1)
    assert why in "".join(f"{record.message}\n" for record in caplog.records)
