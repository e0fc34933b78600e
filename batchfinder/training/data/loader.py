"""Make batches of any size from the data set of a user's loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler, default_collate

from batchfinder.errors import SampleError
from batchfinder.training.data.drawn import DataBatches, batches_of
from batchfinder.training.data.stream import read_by_place
from batchfinder.training.state.reach import random_in
from batchfinder.training.state.snapshot import preserved_state
from batchfinder.training.user_traceback import raised_while

_OR_GIVE = (
    "Try make_batch=make_batch(batch_size, step) in a TrainingSetup, or the longest batch that "
    "there is as the sample."
)


def batches_of_loader(loader: Any, owner: str = "the loader") -> DataBatches:
    """Choose the batches of a loader's data set that a search trains on.

    The loader is not iterated over. Its sampler is copied, and its worker processes do not start.

    Args:
        loader: a DataLoader; a data set, for which ``default_collate`` makes the batches; a
            LightningDataModule; or ``(data set, collate function)``.
        owner: the owner of the data set, for messages.

    Example:
        >>> import torch
        >>> batches_of_loader([torch.zeros(3), torch.ones(3)]).sample
        tensor([[0., 0., 0.]])
    """
    dataset, collate, sampler = examples_of(loader, owner)
    with preserved_state(sampler, collate, tuple(random_in(dataset))):
        return batches_of(dataset, collate, sampler, owner)


def has_places(dataset: Any) -> bool:
    """Return True if examples can be read by index, so that batches of any size can be made."""
    return (
        hasattr(dataset, "__len__")
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, IterableDataset | dict)
    )


def batch_size_of(loader: Any) -> int | None:
    """Return the size of a DataLoader's batches; None without a plain BatchSampler."""
    batches = _plain_batches_of(loader)
    return None if batches is None else batches.batch_size


def _plain_batches_of(loader: Any) -> BatchSampler | None:
    batches = getattr(loader, "batch_sampler", None)
    while batches is not None and type(batches) is not BatchSampler:
        batches = getattr(batches, "batch_sampler", None)  # Accelerate wraps it
    return batches


def training_loader(data: Any) -> Any:
    """Set up a LightningDataModule and return its training loader; other data as they are."""
    if not callable(getattr(data, "train_dataloader", None)):
        return data
    with preserved_state(), raised_while(f"{type(data).__name__} made its training loader"):
        data.prepare_data()
        data.setup("fit")
        return data.train_dataloader()


def by_place(dataset: Any, sampler: Any) -> tuple[Any, Any]:
    """Return a data set and its sampler; of a stream, its first examples, and one of their order.

    The random generators of the data set are afterwards as before.
    """
    if not isinstance(dataset, IterableDataset):
        return dataset, sampler
    with preserved_state(tuple(random_in(dataset))):
        examples = read_by_place(dataset)
    return (dataset, sampler) if examples is dataset else (examples, SequentialSampler(examples))


def parts_of(loader: Any) -> tuple[Any, Any, Any]:
    """Return the data set of a loader, its collate function, and the sampler of a BatchSampler.

    A data set is its own, with ``default_collate``; ``(data set, collate function)`` are two of
    them. The sampler is None if there is none.
    """
    if isinstance(loader, tuple) and len(loader) == 2 and callable(loader[1]):
        return (*loader, None)
    if hasattr(loader, "dataset") and hasattr(loader, "collate_fn"):
        sampler = getattr(_plain_batches_of(loader), "sampler", None)
        return loader.dataset, loader.collate_fn, sampler
    return loader, default_collate, None


def examples_of(loader: Any, owner: str) -> tuple[Any, Any, Any]:
    """Return data set, collate function, and sampler; a None as sampler means a random order.

    Raises:
        SampleError: no batches of other sizes can be made of the data set.
    """
    loader = training_loader(loader)
    dataset, collate, sampler = parts_of(loader)
    is_loader = dataset is not loader and not isinstance(loader, tuple)
    if getattr(loader, "batch_sampler", loader) is not None:  # it makes batches
        dataset, sampler = by_place(dataset, sampler)
    if isinstance(dataset, dict) and dataset:
        raise SampleError(
            f"{owner} reads {type(dataset).__name__}, a dict and no data set. If its values are "
            f"data sets, try one of them: [{next(iter(dataset))!r}]."
        )
    if not has_places(dataset):
        raise SampleError(
            f"{owner} reads {type(dataset).__name__}, which has no examples by their place "
            f"(__len__ and __getitem__), so batches of other sizes cannot be made of it. {_OR_GIVE}"
        )
    if not is_loader or sampler is not None:
        return dataset, collate, sampler
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        raise SampleError(
            f"{owner} makes no batches (batch_size=None), so their size cannot be changed. "
            f"{_OR_GIVE}"
        )
    raise SampleError(
        f"the batches of {owner} are made by {type(batches).__name__}, so their size cannot be "
        "changed. Try (loader.dataset, loader.collate_fn) as the loader: it draws at random."
    )
