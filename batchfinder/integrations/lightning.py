"""A callback for Lightning that finds the batch size and sets it where Lightning's own would.

It derives from Lightning's ``BatchSizeFinder``, so Lightning puts it first among the callbacks and
its ``Tuner`` can use it. Of the tests that Lightning 2.6 has for its finder, 19 of 50 do not pass
(scripts/benchmarks/frameworks_own_tests.py names them), for these reasons:

- Loaders passed to ``fit``, and several ranks, are refused there and work here.
- A batch size above the data set's length is kept there. Here the data set is the bound.
- ``margin`` reduces the size there even if nothing above it failed.
- Log lines of each trial are counted there. Here sizes are tried in another order.
- Exceptions of the user's code on the CPU come as ``UserCodeError``, because sizes are tried in
  other processes there.
- A ``training_step`` without a loss and errors without a message are no out-of-memory errors here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from batchfinder.errors import NothingFitsError, UsageError
from batchfinder.finder import find_max_batch
from batchfinder.integrations.lightning_data import Loaders
from batchfinder.integrations.lightning_step import EvaluationStep, StepInTrainer
from batchfinder.probing.devices.choose_device import choose_device
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.training.frameworks.lightning import OwnTrainingStep
from batchfinder.training.frameworks.manual_optimization import ManualStep
from batchfinder.training.setup import TrainingSetup
from batchfinder.units import positive


def _lightning() -> str:
    """Return the name of the Lightning that is loaded, else of the one that can be imported."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        if find_spec(name.partition(".")[0]) is not None:
            return name
    raise UsageError(
        "batchfinder.integrations.lightning needs Lightning. Try pip install lightning"
    )


_PACKAGE = _lightning()
_Finder: Any = import_module(f"{_PACKAGE}.callbacks").BatchSizeFinder
_DummyLogger: Any = import_module(f"{_PACKAGE}.loggers.logger").DummyLogger
_exceptions: Any = import_module(f"{_PACKAGE}.utilities.exceptions")
_parsing: Any = import_module(f"{_PACKAGE}.utilities.parsing")
_rank_zero: Any = import_module(f"{_PACKAGE}.utilities.rank_zero")
_strategies: Any = import_module(f"{_PACKAGE}.strategies")

_SMALLER_VALIDATION = "a smaller batch_size in val_dataloader(), or its results on the host, .cpu()"


class BatchSizeFinder(_Finder):  # type: ignore[misc]
    """Find the largest batch size that really trains as ``fit`` begins, and train with it.

    The size is set in ``model``, ``model.hparams``, ``datamodule`` and ``datamodule.hparams``, if
    they have the attribute. Loaders passed to ``fit`` are made again with the new size. Model,
    optimizers, random state and the Trainer's counters are restored. It works for automatic and
    manual optimization, with accumulation, and with ``strategy="ddp"``, where all ranks agree on
    one size. With ``validate``, ``test`` and ``predict`` it finds the largest batch of that step,
    on one device.

    Where the loaders of ``val_dataloader`` have a batch size of their own, a validation is part of
    the search: its largest batch, and what the steps of all its batches keep. Loaders whose size is
    that of the attribute are taken to follow it. A validation is left out if its CombinedLoader
    joins the batches of loaders, or with a warning if a hook at its start may make what it needs.

    Callbacks, loggers and the module's hooks around its step do not run during the search. Only the
    hooks that move a batch to its device do.

    Args:
        mode: ``"binsearch"``: the largest size that fits, reduced by ``margin`` unless it is the
            largest allowed, above which nothing failed. ``"power"``: the largest size that fits and
            is ``init_val`` times, or divided by, a power of two.
        steps_per_trial: the least number of full steps that confirm the answer.
        init_val: the size at which Lightning starts to double. Here only mode ``"power"`` and
            ``max_trials`` depend on it.
        max_trials: no size is above ``init_val * 2 ** (max_trials - 1)``, which this many trials
            reach by doubling. 0: set ``init_val`` without a search.
        batch_arg_name: the attribute that holds the batch size.
        margin: fraction from 0 to below 1 by which ``"binsearch"`` reduces the size.
        max_val: the largest size allowed. The number of examples of a rank is a limit too.
        memory_limit: memory to use at most: bytes, or text such as ``"24GiB"``.
        headroom: fraction of the memory kept free, from 0 to below 1.

    Attributes:
        optimal_batch_size: the size that was set; None after ``fast_dev_run``.
        result: the :class:`~batchfinder.BatchSizeResult` of the search; None before it.

    Raises:
        UsageError: Lightning is missing, an argument is invalid, nothing holds the batch size,
            or the strategy shards the model.
        NothingFitsError: not even one example fits.
        Exception: whatever :func:`~batchfinder.find_max_batch` raises.

    Example:
        >>> from batchfinder.integrations.lightning import BatchSizeFinder  # doctest: +SKIP
        >>> trainer = Trainer(callbacks=[BatchSizeFinder("binsearch")])  # doctest: +SKIP
        >>> trainer.fit(model, datamodule=data)  # doctest: +SKIP
    """

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
        *,
        memory_limit: str | int | None = None,
        headroom: float = 0.05,
    ) -> None:
        if not 0 <= margin < 1:
            raise UsageError(f"margin is a fraction from 0 to below 1, not {margin}")
        positive("init_val", init_val)
        positive("max_val", max_val)
        super().__init__(mode, steps_per_trial, init_val, max_trials, batch_arg_name)
        self._margin, self._max_val = margin, max_val  # before 2.6 Lightning had neither
        self._limits: dict[str, Any] = {"memory_limit": memory_limit, "headroom": headroom}
        self.result: BatchSizeResult | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Check that the batch size can be set, before anything runs."""
        if stage not in (None, "fit"):
            super().setup(trainer, pl_module, stage)
            return
        known = (_strategies.SingleDeviceStrategy, _strategies.DDPStrategy)
        if not isinstance(trainer.strategy, known):
            raise UsageError(
                f"{type(trainer.strategy).__name__} shards the model: a rank out of memory would "
                "leave the others waiting. Try torchrun -m batchfinder find --strategy fsdp with a "
                "function that builds the module, and set the batch size it prints"
            )
        if not trainer.fit_loop._data_source.is_module():
            Loaders(trainer.fit_loop).check_resizable()
        elif not _parsing.lightning_hasattr(pl_module, self._batch_arg_name):
            raise UsageError(
                f"neither model nor datamodule, nor their hparams, have {self._batch_arg_name}. "
                f"Try self.{self._batch_arg_name} = 1, read in train_dataloader(), or "
                "batch_arg_name="
            )
        elif hasattr(pl_module, self._batch_arg_name) and self._batch_arg_name in getattr(
            pl_module, "hparams", ()
        ):
            name = self._batch_arg_name
            _rank_zero.rank_zero_warn(
                f"Field `model.{name}` and `model.hparams.{name}` are mutually exclusive! Both are "
                "set. Try keeping only one of them"
            )

    def scale_batch_size(self, trainer: Any, pl_module: Any) -> None:
        """Find the batch size of the Trainer's active loop, and set it.

        Call it from a hook of your own to search at another moment, such as the start of an epoch.
        """
        if trainer.fast_dev_run:
            _rank_zero.rank_zero_warn("fast_dev_run is set: the batch size stays as it is")
            self.optimal_batch_size = None
        else:
            self._find_and_set(trainer, pl_module)
        if self._early_exit:
            raise _exceptions._TunerExitException

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        """Release what the check left in the allocator's cache: the proof began without it."""
        if self.result is not None:
            choose_device(trainer.strategy.root_device).release_cache()

    def _find_and_set(self, trainer: Any, module: Any) -> None:
        loaders = Loaders(trainer._active_loop)
        size = self._init_val
        if self._max_trials > 0:
            size = self._rounded(self._largest(trainer, module, loaders))
        self.optimal_batch_size = size
        if _parsing.lightning_hasattr(module, self._batch_arg_name):
            _parsing.lightning_setattr(module, self._batch_arg_name, size)
        loaders.reload(size)
        if not (made := loaders.batch_sizes) & {size, None}:
            _rank_zero.rank_zero_warn(
                f"the loaders make batches of {' and '.join(map(str, made))}, not of {size}. Try "
                f"batch_size=self.{self._batch_arg_name} in them"
            )
        why = ""
        if self.result is not None and self.result.batch_size == loaders.examples:
            why = f": the data set has only {loaders.examples} examples for a rank"
        elif self.result is not None and self.result.status is Status.CAPPED:
            limits = f"max_val={self._max_val} and max_trials={self._max_trials}"
            why = f": {limits} allow no more"
        _rank_zero.rank_zero_info(f"batchfinder: {self._batch_arg_name} is set to {size}{why}")

    def _largest(self, trainer: Any, module: Any, loaders: Loaders) -> BatchSizeResult:
        """Find the largest size that fits within the bounds."""
        loaders.close()
        batches = loaders.batches()
        for remark in batches.remarks:
            _rank_zero.rank_zero_warn(remark)
        most = min(self._max_val, self._init_val * 2 ** (self._max_trials - 1))
        if loaders.examples is not None:
            most = min(most, loaders.examples)
        is_fit, wrapped = trainer.training, trainer.strategy.model
        with self._undisturbed(trainer, module):
            result = find_max_batch(
                TrainingSetup(
                    wrapped if isinstance(wrapped, DistributedDataParallel) else module,
                    sample=batches.sample,
                    make_batch=batches.make_batch,
                    **self._step_and_optimizer(trainer, module),
                ),
                device=trainer.strategy.root_device,
                accumulate=is_fit and trainer.accumulate_grad_batches > 1,
                max_batch_size=most,
                confirm_steps=max(1, self._steps_per_trial),
                **self._limits,
            )
        self.result = result
        failure = result.next_failure
        in_validation = failure is not None and failure.is_in_validation
        if not result.batch_size:
            where = ", because of the validation" if in_validation else ""
            advice = "accumulate_grad_batches, activation checkpointing, or shorter sequences"
            raise NothingFitsError(
                f"not even one example fits into {result.device}{where}. "
                f"Try {_SMALLER_VALIDATION if in_validation else advice}"
            )
        if failure is not None and in_validation:
            _rank_zero.rank_zero_warn(
                f"a batch of {failure.batch_size} trains, but the validation after it runs out of "
                f"memory. Try {_SMALLER_VALIDATION}"
            )
        return result

    def _step_and_optimizer(self, trainer: Any, module: Any) -> dict[str, Any]:
        step: Any
        name, validation = self._batch_arg_name, None
        has_size = _parsing.lightning_hasattr(module, name)
        if not trainer.training:
            step = EvaluationStep(module, trainer.state.fn.value)
            optimizer = step.optimizer
        else:
            configs = [config.scheduler for config in trainer.lr_scheduler_configs]
            is_automatic = module.automatic_optimization
            if not is_automatic and getattr(
                trainer.strategy.model, "find_unused_parameters", False
            ):
                # The backward pass inside the step comes before DDP has looked for them.
                raise UsageError(
                    "manual optimization cannot be searched while DistributedDataParallel finds "
                    'unused parameters. Try strategy="ddp" for the search'
                )
            optimizers = trainer.strategy.optimizers
            step = OwnTrainingStep() if is_automatic else ManualStep((optimizers, configs))
            optimizer = optimizers[0]
            if trainer.enable_validation:
                size = _parsing.lightning_getattr(module, name) if has_size else None
                validation = Loaders(trainer.fit_loop.epoch_loop.val_loop).validation(size)

        def note_size(size: int) -> None:
            if has_size:
                _parsing.lightning_setattr(module, name, size)

        step = StepInTrainer(step, trainer, note_size, validation)
        return {"step": step, "optimizer": optimizer}

    @contextlib.contextmanager
    def _undisturbed(self, trainer: Any, module: Any) -> Iterator[None]:
        """Keep loggers out of the search, and restore the batch size after it."""
        name, loggers = self._batch_arg_name, trainer.loggers
        has_size = _parsing.lightning_hasattr(module, name)
        before = _parsing.lightning_getattr(module, name) if has_size else None
        trainer.loggers = [_DummyLogger()] if loggers else []
        try:
            yield
        finally:
            trainer.loggers = loggers
            if has_size:
                _parsing.lightning_setattr(module, name, before)

    def _rounded(self, result: BatchSizeResult) -> int:
        """Return the size to set: the largest one, reduced as the mode says."""
        size = result.batch_size
        if self._mode == "binsearch":
            is_capped = result.status is Status.CAPPED
            return size if is_capped else max(1, int(size * (1 - self._margin)))
        power: int = self._init_val
        while power > size:
            power //= 2
        while 2 * power <= size:
            power *= 2
        return power
