"""Draw the batches of a ``Trainer`` of transformers from its data as the Trainer does.

In training, the user's collator pads every batch to its longest example.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils.data import ConcatDataset

from batchfinder.errors import SampleError
from batchfinder.training.data.drawn import DataBatches, batches_in_turn, batches_of
from batchfinder.training.data.loader import batch_size_of, by_place, has_places, parts_of
from batchfinder.training.setup import Trainer
from batchfinder.training.state.reach import random_in
from batchfinder.training.state.snapshot import preserved_state
from batchfinder.training.tree import named_tensors


def batches_of_trainer(trainer: Trainer) -> DataBatches:
    """Choose the batches that a search trains on, made as the Trainer's DataLoader makes them."""
    if hasattr(trainer.train_dataset, "__len__") and not len(trainer.train_dataset):
        raise SampleError("the Trainer's train_dataset has no examples; give it at least one")
    with preserved_state(), _no_loader_noted(trainer):
        return batches_of_its_loader(trainer.get_train_dataloader())


def size_of_batches(trainer: Trainer) -> int | None:
    """Return the size of the batches that a Trainer's loader makes; None if it does not say."""
    if trainer.train_dataset is None:
        return None
    with preserved_state(), _no_loader_noted(trainer):
        return batch_size_of(trainer.get_train_dataloader())


def batches_of_its_loader(loader: Any) -> DataBatches:
    """Choose the batches of a Trainer's loader, or its first one if it has no examples by index."""
    dataset, collate, sampler = parts_of(loader)
    collate = _own(collate)
    with preserved_state(collate, tuple(random_in(loader))):
        dataset, sampler = by_place(dataset, sampler)
        if isinstance(dataset, ConcatDataset) and sampler is None:
            return batches_in_turn(dataset.datasets, collate, "the Trainer")
        if dataset is not loader and has_places(dataset):
            return batches_of(dataset, collate, sampler, "the Trainer")
        batch = _first_batch(loader)
    remark = (
        "the batches tried are as long as the first one of the Trainer's; if others are longer, "
        "search with the longest alone"
    )
    return DataBatches(batch, remarks=(remark,))


def _own(collate: Any) -> Any:
    """Return a copy of a collator, which may set attributes such as a generator from its seed."""
    own = copy.copy(collate)
    if hasattr(own, "data_collator"):  # the Trainer's, below the one that removes columns
        own.data_collator = copy.copy(own.data_collator)
    return own


def longest_to_evaluate(trainer: Trainer, datasets: list[Any]) -> list[Callable[[int], Any]]:
    """Return for each data set what makes its largest batches, as the Trainer evaluates on them.

    There is none if the Trainer does not say how it loads them.
    """
    acting: Any = copy.copy(trainer)  # it keeps loaders whose worker processes stay
    if not hasattr(acting, "get_eval_dataloader"):
        return []
    with preserved_state(), _no_loader_noted(trainer):
        loaders = [acting.get_eval_dataloader(dataset) for dataset in datasets]
        return [batches_of_its_loader(loader).make_longest for loader in loaders]


@contextmanager
def _no_loader_noted(trainer: Trainer) -> Iterator[None]:
    """Remove DataLoaders from Accelerate's list, or each worker process would get the data."""
    noted = getattr(getattr(trainer, "accelerator", None), "_dataloaders", [])
    before = list(noted)
    try:
        yield
    finally:
        noted[:] = before


def _first_batch(loader: Any) -> Any:
    batch = next(iter(loader))
    if hasattr(loader, "end"):  # end Accelerate's iteration, or it counts as still running
        loader.end()
    return batch


def fetches_ahead(trainer: Any) -> bool:
    """Return True for a Trainer that fetches all micro-batches of a step first.

    It does so since transformers 4.46. TRL before 0.12 has a method of that name that generates.
    """
    fetch = getattr(trainer, "get_batch_samples", None)
    return fetch is not None and "model" not in inspect.signature(fetch).parameters


def items_in(acting: Any, batch: Any) -> dict[str, Any]:
    """Return the number of items by which ``compute_loss`` divides a sum, as a keyword.

    Transformers before 4.46 has no such keyword.
    """
    if not fetches_ahead(acting):
        return {}
    tensors = [tensor for _, tensor in named_tensors(batch)]
    device = tensors[0].device if tensors else acting.args.device
    arguments = (iter([batch]), 1, device)
    takes_device = len(inspect.signature(acting.get_batch_samples).parameters) > 2
    _, items = acting.get_batch_samples(*arguments if takes_device else arguments[:2])
    if isinstance(items, Tensor) and items.dim():
        items = items.flatten()[0]  # DataParallel, not used here, has one per GPU
    return {"num_items_in_batch": items}
