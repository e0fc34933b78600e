"""The batches of a ``Trainer`` of transformers, drawn from its data as it draws them.

Every batch in training is padded to its longest example, by a collator of the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from batchfinder.errors import SampleError
from batchfinder.training.data.drawn import DataBatches, batches_of
from batchfinder.training.data.loader import has_places, sampler_of
from batchfinder.training.setup import Trainer
from batchfinder.training.state.snapshot import preserved_state


def batches_of_trainer(trainer: Trainer) -> DataBatches:
    """Choose the batches to try of a Trainer, made as its DataLoader makes them.

    Args:
        trainer: stays as it is.

    Raises:
        SampleError: there are no examples.
        Exception: what data set and collator raise.
    """
    if hasattr(trainer.train_dataset, "__len__") and not len(trainer.train_dataset):
        raise SampleError("the Trainer's train_dataset has no examples; give it at least one")
    with preserved_state(), _no_loader_noted(trainer):
        loader = trainer.get_train_dataloader()
        dataset: Any = getattr(loader, "dataset", None)
        collate = getattr(loader, "collate_fn", None)
        if collate is None or not has_places(dataset):
            remark = (
                "the batches tried are as long as the first one of the Trainer's; give a sample "
                "as long as any in training"
            )
            return DataBatches(_first_batch(loader), None, remarks=(remark,))
        return batches_of(dataset, collate, sampler_of(loader), "the Trainer")


@contextmanager
def _no_loader_noted(trainer: Trainer) -> Iterator[None]:
    """Accelerate notes each DataLoader, with which the data would go to every worker process."""
    noted = getattr(getattr(trainer, "accelerator", None), "_dataloaders", [])
    before = list(noted)
    try:
        yield
    finally:
        noted[:] = before


def _first_batch(loader: Any) -> Any:
    batch = next(iter(loader))
    if hasattr(loader, "end"):  # one of Accelerate's, else taken for the one that is iterated over
        loader.end()
    return batch
