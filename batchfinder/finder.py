"""``find_max_batch()``: find the largest batch size that really trains."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batchfinder.errors import UsageError, UserCodeError, warn_of
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.place import prices_for
from batchfinder.results.result import BatchSizeResult
from batchfinder.search.bounds import Bounds
from batchfinder.search.deadline import deadline_in
from batchfinder.search.remarks import loader_remarks
from batchfinder.search.run import OnProbe, run_search
from batchfinder.simulation.recordings.guess import head_start_of
from batchfinder.units import bytes_if_given

if TYPE_CHECKING:
    import torch
    from torch import nn

    from batchfinder.training.setup import (
        LossFunction,
        MakeBatch,
        OptimizerSpec,
        StepFunction,
        Trainer,
        TrainingSetup,
    )


def find_max_batch(
    model: nn.Module | Trainer | TrainingSetup,
    sample: Any = None,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerSpec | None = None,
    step: StepFunction | None = None,
    make_batch: MakeBatch | None = None,
    loader: Any = None,
    device: str | torch.device | None = None,
    memory_limit: str | int | None = None,
    headroom: float = 0.05,
    precision: str = "fp32",
    accumulate: bool = False,
    compile: bool = False,  # noqa: A002 - named as torch.compile is
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    multiple_of: int = 1,
    confirm_steps: int = 3,
    batch_dim: int | None = None,
    strategy: str | None = None,
    start_from_estimate: bool = False,
    throughput: bool = False,
    mode: str = "train",
    eval_batch_size: int | None = None,
    time_limit: float | None = None,
    on_probe: OnProbe | None = None,
) -> BatchSizeResult:
    """Find the largest batch size that really trains on a device, by real training steps.

    Model, optimizer and random generators are restored bit for bit, even after an error or Ctrl-C.

    On accelerators, sizes are tried in this process. Anything that the step and the loss function
    can reach (closures, globals, ``self``) is restored too. So are the random generators of data
    sets, but nothing else of them, and no objects of libraries without a ``state_dict``. On the
    CPU, sizes are tried in forks of this process, because an out-of-memory error leaves holes in
    the heap. A process that cannot be forked tries them itself, with a warning.

    Args:
        model: the module to train. Or a :class:`TrainingSetup` in place of this and the next six
            arguments; or a ``transformers.Trainer``, which supplies those that are not given.
        sample: one batch as the DataLoader yields it, of any size: a pytree of tensors with the
            batch dimension first. Use the longest sequences of your data.
        loss_fn: ``loss_fn(output, batch) -> loss``, or one of the targets alone, such as
            ``nn.CrossEntropyLoss()``. Default: the output's ``loss``; a scalar output;
            cross-entropy or mean squared error for ``(inputs, targets)``; else the mean of the
            outputs, with a warning. A model whose ``forward`` takes the targets makes the loss. A
            LightningModule uses its ``training_step``.
        optimizer: an instance, a factory ``factory(params)``, or the name of a class of
            ``torch.optim``. Default: what a LightningModule configures, else AdamW.
        step: ``step(model, batch) -> loss``, in place of forward pass and loss; or
            ``step(model, batch) -> None``, which runs the whole training step by itself. Its result
            and its local variables stay alive until the next step gives them new values, as in a
            loop with these lines. If your loop calls a function, whose variables end with it, give
            ``lambda model, batch: function(model, batch)``. The default step clears gradients after
            the optimizer's step. If your loop clears them only after the forward pass, they need
            memory there: give a step that does so too.
        make_batch: ``make_batch(batch_size) -> batch``, instead of repeating the sample; or
            ``make_batch(batch_size, step)``, where step 0 gets the longest batch.
        loader: your DataLoader, a data set, ``(data set, collate function)`` or a
            LightningDataModule, instead of the sample. A confirmation trains on batches drawn from
            it, the longest first and last. The loader itself is neither used up nor changed.
        device: such as ``"cuda:0"`` or ``"cpu"``. Default: the model's device if that is an
            accelerator, else an accelerator if there is one, else the CPU.
        memory_limit: memory to use at most: bytes, or text such as ``"24GiB"``. Default: all free
            memory.
        headroom: fraction of the memory kept free, from 0 to below 1. What a search does not see
            may need some of it, such as the smaller last batch of an epoch.
        precision: ``"fp32"``, or ``"bf16"`` / ``"fp16"`` under autocast; fp16 also with a
            GradScaler.
        accumulate: measure with gradient accumulation: gradients stay in memory during the
            forward pass.
        compile: run the model through ``torch.compile``, which compiles it for each size.
        min_batch_size: the smallest size to try.
        max_batch_size: the largest size to try, for example the size of the data set.
        multiple_of: every size tried is a multiple of it.
        confirm_steps: the least number of full steps that confirm the answer; at least 6 on the
            CPU.
        batch_dim: index of the batch dimension. Default: 0.
        strategy: ``"ddp"``: all ranks of this job search together, and each has to make this call.
            Default: ``"ddp"`` in a process group of several ranks, else none. For ``"fsdp"`` use
            ``batchfinder find`` under torchrun.
        start_from_estimate: expect the size that :func:`estimate_max_batch` does for this device,
            and confirm it after two small sizes. A single process on CUDA only chooses those by it,
            and expects a size from the memory requests that they record, as without it.
        throughput: also time steps at sizes below the answer, for the result's ``throughput``. This
            trains on at most as many examples as the search. A ``loader`` is read for a few
            seconds; a warning says if it is slower than the steps.
        mode: ``"eval"``: run forward passes and losses in eval mode without gradients, while the
            gradients and optimizer states of a training are in memory, after steps with a few
            examples. Steps of a real size may leave less room; ``eval_batch_size`` proves that.
            ``"inference"``: run forward passes with the model alone in memory. Default: train.
        eval_batch_size: also run a validation after every step, with batches of this size.
            Default: none, or a ``transformers.Trainer``'s own if it has an ``eval_dataset``.
        time_limit: seconds after which the search ends with the largest size confirmed by then. A
            running step is not interrupted. Default: no limit.
        on_probe: called with each :class:`Probe` as it ends, such as ``print``.

    Returns:
        The answer with its evidence. Its ``accumulation_plan(4096)`` reaches a global batch of
        4096. If not even the smallest size fits, ``status`` is
        ``NOTHING_FITS`` and ``batch_size`` is 0. After a time limit, ``status`` is ``TIME_LIMIT``.

    Warns:
        BatchFinderWarning: once for each of the result's ``warnings``.

    Raises:
        UsageError: an argument is invalid.
        SampleError, StepError, DeviceError: see :mod:`batchfinder.errors`.
        RankError: the ranks of the job ask for different things, or one does not make this call.
        BatchTooSmallError: the step needs more examples than any size that is allowed.
        TimeLimitError: no size was confirmed within the time limit.
        WorkerError: worker processes die at every size.
        Exception: what the model or one of the functions raises, except out-of-memory errors.
        UserCodeError: the same exceptions from a fork of this process, which is usual on the CPU.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1024, 1024)
        >>> sample = torch.randn(8, 1024), torch.randn(8, 1024)
        >>> find_max_batch(model, sample, device="cpu", max_batch_size=64).batch_size
        64
    """
    # Imported late: the command line imports this module before it needs torch.
    from batchfinder.probing.choose_prober import choose_prober, strategy_of_this_job
    from batchfinder.training.complete_setup import completed
    from batchfinder.training.data.loader import training_loader
    from batchfinder.training.setup import setup_of
    from batchfinder.training.user_traceback import add_hint

    deadline = deadline_in(time_limit)
    given = setup_of(model, sample, loss_fn, optimizer, step, make_batch, loader)
    # Once: a LightningDataModule may download, or read all files.
    loader = training_loader(given.loader)
    setup, warnings = completed(replace(given, loader=loader))
    bounds = Bounds.of(min_batch_size, max_batch_size, multiple_of)
    options = ProbeOptions(
        device=None if device is None else str(device),
        memory_limit=bytes_if_given(memory_limit),
        headroom=headroom,
        precision=precision,
        accumulate=accumulate,
        compiled=compile,
        confirm_steps=confirm_steps,
        smallest=bounds.first,
        batch_dim=batch_dim or 0,
        strategy=strategy or strategy_of_this_job(setup.model),
        mode=mode,
        eval_batch_size=eval_batch_size,
    )
    if deadline is not None and options.strategy is not None:
        raise UsageError("time_limit is for a single process: the clocks of ranks differ")
    estimate = None
    if start_from_estimate:  # slow to import, and seldom needed
        from batchfinder.simulation.starting_estimate import starting_estimate

        estimate = partial(starting_estimate, setup, options)
    with closing(choose_prober(setup, options)) as prober:
        try:
            result = run_search(
                prober,
                bounds,
                on_probe=on_probe,
                measures_throughput=throughput,
                prices=prices_for(prober),
                deadline=deadline,
                head_start=head_start_of(prober, confirm_steps, estimate),
            )
            result = replace(
                result,
                warnings=(*warnings, *result.warnings),
                mode=mode,
                eval_batch_size=eval_batch_size,
            )
            result = prober.agreed(result)
            if loader is not None and result.throughput is not None:
                remarks = loader_remarks(_rate_of(loader), result.throughput)
                result = replace(result, warnings=(*result.warnings, *remarks))
        except UserCodeError as error:
            # The cause has the user's traceback. The frames of this package would add nothing.
            raise error.with_traceback(None) from error.__cause__
        except Exception as error:
            add_hint(error)  # of a step in this process
            raise
    warn_of(result.warnings)
    return result


def _rate_of(loader: Any) -> float:
    """Return how many examples a second a loader yields by itself. Its state is restored."""
    from batchfinder.training.data.rate import samples_per_second
    from batchfinder.training.state.snapshot import preserved_state

    with preserved_state(*(loader if isinstance(loader, tuple) else (loader,))):
        return samples_per_second(loader)
