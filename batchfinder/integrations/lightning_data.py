"""The loaders of a Lightning loop: their batches, and the same loaders with another size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from torch.utils._pytree import tree_unflatten
from torch.utils.data import BatchSampler, DataLoader

from batchfinder.errors import UsageError
from batchfinder.training.data.drawn import DataBatches
from batchfinder.training.data.loader import batch_size_of
from batchfinder.training.frameworks.trainer_batch import batches_of_its_loader
from batchfinder.training.sample import BatchMaker
from batchfinder.training.state.snapshot import preserved_state
from batchfinder.training.tree import bytes_in


@dataclass(frozen=True)
class Validation:
    """The largest batch of a validation.

    Attributes:
        batch_size: its number of examples.
        batches: makes it.
        arguments: the arguments of ``validation_step`` after the batch.
        examples: the number of examples that a rank validates.
    """

    batch_size: int
    batches: BatchMaker
    arguments: tuple[int, ...]
    examples: int

    def nbytes(self) -> int:
        """Return the bytes of the batch."""
        return bytes_in(self.batches.make(self.batch_size))


class Loaders:
    """The loaders that the Trainer's fit loop, or the loop of an evaluation, iterates over."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._package = type(loop).__module__.partition(".loops")[0]
        self._source: Any = loop._data_source
        self._combined: Any = None

    @property
    def examples(self) -> int | None:
        """The number of examples of a rank, at least 1; None if the data set has no length."""
        try:
            length: int = self._loaders()._dataset_length()
        except NotImplementedError:  # what Lightning raises for iterable data sets
            return None
        ranks: int = self._loop.trainer.world_size
        return max(1, length // ranks)

    @property
    def batch_sizes(self) -> set[int | None]:
        """The batch size of each loader; None if it does not say."""
        return {batch_size_of(loader) for loader in self._loaders().flattened}

    def batches(self) -> DataBatches:
        """Choose batches as the loaders make them: the longest first, others as they come.

        Raises:
            SampleError: there are no examples.
        """
        combined = self._loaders()
        found = [_batches_of(loader) for loader in combined.flattened]
        remarks = tuple(remark for one in found for remark in one.remarks)
        if all(one.make_batch is None for one in found):
            sample = tree_unflatten([one.sample for one in found], combined._spec)
            return DataBatches(sample, remarks=remarks)

        def longest(batch_size: int) -> Any:
            return tree_unflatten([one.make_longest(batch_size) for one in found], combined._spec)

        def drawn(batch_size: int, step: int) -> Any:
            return tree_unflatten([one.at(batch_size, step) for one in found], combined._spec)

        varies = any(one.drawn for one in found)
        return DataBatches(None, longest, drawn if varies else None, remarks)

    def validation(self, follows: int | None) -> Validation | None:
        """Choose the largest batch of a validation; None if it is no part of the search.

        Args:
            follows: the size at which the module now makes loaders. Those of this size are taken to
                follow it: their validation needs less memory than the training does at any size.
        """
        combined, found = self._loaders(), list[Validation]()
        if combined._mode != "sequential":  # each batch joins those of all loaders
            return None
        loaders, ranks = combined.flattened, self._loop.trainer.world_size
        hook = self._hook_before_validation()
        for index, loader in enumerate(loaders):
            size = batch_size_of(loader)
            if size is None or (size == follows and self._source.is_module()):
                continue
            count = len(loader.dataset) if hasattr(loader.dataset, "__len__") else size * ranks
            if not count:
                continue
            if hook:
                import_module(f"{self._package}.utilities.rank_zero").rank_zero_warn(
                    f"the search leaves the validation out, as it does not run {hook}, which may "
                    "make what the validation needs. Try to make that in __init__"
                )
                return None
            batches = BatchMaker(make_batch=_batches_of(loader).make_longest)
            arguments = (0, index) if len(loaders) > 1 else (0,)
            count = -(-count // ranks)
            limit = self._loop.trainer.limit_val_batches  # batches, or a share of them
            most = size * limit if isinstance(limit, int) else round(count * limit)
            found.append(Validation(min(size, count), batches, arguments, min(count, most)))
        largest = max(found, key=Validation.nbytes, default=None)
        return largest and replace(largest, examples=sum(one.examples for one in found))

    def _hook_before_validation(self) -> str:
        is_overridden = import_module(f"{self._package}.utilities.model_helpers").is_overridden
        module = self._loop.trainer.lightning_module
        hooks = ("on_validation_epoch_start", "on_validation_start")
        return next((hook for hook in hooks if is_overridden(hook, module)), "")

    def check_resizable(self) -> None:
        """Refuse loaders passed to ``fit`` that cannot be made again with another batch size.

        Raises:
            UsageError: a loader is no DataLoader, or has a batch sampler of its own.
        """
        for loader in self._loaders().flattened:
            self._resized(loader, 1)

    def close(self) -> None:
        """End the worker processes of the loaders, so that a search does not fork with them."""
        fetcher = self._loop._data_fetcher
        if fetcher is not None:
            fetcher.teardown()

    def reload(self, batch_size: int) -> None:
        """Let the loop make its loaders again. Those passed to ``fit`` get the batch size."""
        if not self._source.is_module():
            combined = self._loaders()
            resized = [self._resized(loader, batch_size) for loader in combined.flattened]
            made = tree_unflatten(resized, combined._spec)
            self._source.instance = type(combined)(made, combined._mode)
        self._combined = None
        loop = self._loop
        loop._combined_loader = None
        loop.setup_data()
        if not hasattr(loop, "epoch_loop"):
            loop.reset()
        elif loop.trainer.enable_validation:
            validation = loop.epoch_loop.val_loop
            validation._combined_loader = None
            validation.setup_data()

    def _loaders(self) -> Any:
        if self._combined is None:
            kind = import_module(f"{self._package}.utilities.combined_loader").CombinedLoader
            with preserved_state():
                made = self._source.dataloader()
            mode = "max_size_cycle" if hasattr(self._loop, "epoch_loop") else "sequential"
            self._combined = made if isinstance(made, kind) else kind(made, mode)
        return self._combined

    def _resized(self, loader: Any, batch_size: int) -> Any:
        """Return the same DataLoader with another batch size."""
        if not isinstance(loader, DataLoader):
            raise UsageError(
                f"{type(loader).__name__} was passed to fit, which has no batch size to set. Try a "
                "DataLoader, or train_dataloader() of the module that reads self.batch_size"
            )
        if type(loader.batch_sampler) is not BatchSampler:
            raise UsageError(
                "a DataLoader with a batch sampler of its own was passed to fit. Try "
                "train_dataloader() of the module, which makes it with self.batch_size"
            )
        data: Any = import_module(f"{self._package}.utilities.data")
        _, options = data._get_dataloader_init_args_and_kwargs(loader, loader.sampler)
        made: Any = data._reinstantiate_wrapped_cls(loader, **{**options, "batch_size": batch_size})
        return made


def _batches_of(loader: Any) -> DataBatches:
    with preserved_state():
        if getattr(loader, "batch_sampler", None) is None:  # the data set makes whole batches
            return DataBatches(next(iter(loader)))
        return batches_of_its_loader(loader)
