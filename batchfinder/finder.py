"""``find_max_batch()``: the largest batch size that really trains, from question to answer."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from batchfinder.errors import UsageError, UserCodeError, warn_of
from batchfinder.probing.options import ProbeOptions
from batchfinder.results.result import BatchSizeResult
from batchfinder.search.bounds import Bounds, check_bounds, whole_bounds
from batchfinder.search.deadline import deadline_in
from batchfinder.search.head_start import HeadStart
from batchfinder.search.run import OnProbe, run_search
from batchfinder.simulation.rehearsal import rehearsal_of
from batchfinder.units import parse_bytes

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

    Model, optimizer and random generators are afterwards as they were before, bit for bit, also
    after an error or Ctrl-C.

    On accelerators sizes are tried in this process: all that step and loss function reach in their
    closures, their globals and the objects whose methods they are is put back as well, except
    objects of libraries that have no ``state_dict``, and data sets. On the CPU sizes are tried in
    forks of this process, as an out-of-memory leaves holes in the heap of the process it happens
    in. Where the process cannot be forked they are tried in it, with a warning.

    Args:
        model: the module to train; or instead of this and the next six a :class:`TrainingSetup`,
            or a ``transformers.Trainer``, which brings those of them that are not given.
        sample: one batch as the DataLoader yields it, of any size: a pytree of tensors with the
            batch dimension first, with the longest sequences that there will be.
        loss_fn: ``loss_fn(output, batch) -> loss``. Default: the output's ``loss``; a scalar
            output; cross-entropy or mean squared error for ``(inputs, targets)``; else the mean
            of the outputs, with a warning. A LightningModule's: by its ``training_step``.
        optimizer: an instance, a factory ``factory(params)``, or the name of a class of
            ``torch.optim``. Default: what a LightningModule configures, else AdamW.
        step: ``step(model, batch) -> loss``, in place of forward pass and loss; or
            ``step(model, batch) -> None`` in place of all of it: it trains by itself.
        make_batch: ``make_batch(batch_size) -> batch``, in place of repeating the sample; or
            ``make_batch(batch_size, step)``, where step 0 gets the longest batch.
        loader: your DataLoader, a data set or ``(data set, collate function)``, in place of the
            sample: a confirmation trains on batches drawn from it, the longest first and last. The
            loader itself is not used up or changed.
        device: such as ``"cuda:0"`` or ``"cpu"``. Default: the model's own if that is an
            accelerator, else the accelerator there is, else the CPU.
        memory_limit: as if the device had no more than this: bytes, or text as ``"24GiB"``.
            Default: all that is free.
        headroom: fraction of the memory kept free, from 0 to below 1.
        precision: ``"fp32"``, or ``"bf16"`` / ``"fp16"`` with autocast (fp16: and a GradScaler).
        accumulate: measure with gradient accumulation, where gradients are alive during the
            forward pass.
        compile: run the model through ``torch.compile`` with a dynamic batch dimension.
        min_batch_size: the smallest size to try.
        max_batch_size: the largest size to try: the size of the data set, say.
        multiple_of: only multiples of this are tried.
        confirm_steps: the least number of full steps that the answer is confirmed with; on the CPU
            6 at least.
        batch_dim: index of the batch dimension. Default: 0.
        strategy: ``"ddp"``: all ranks of this job search together, and each has to make this call.
            Default: ``"ddp"`` in a process group of several ranks, else none. For ``"fsdp"`` use
            ``batchfinder find`` under torchrun.
        start_from_estimate: after two small sizes, confirm what :func:`estimate_max_batch` expects
            of this device. Without, that is done where it pays: on an accelerator where a single
            process trains without ``compile``, and by the two a step at the answer's size should
            take a second or more.
        throughput: also time steps at sizes below the answer; see the result's ``throughput``. It
            takes at most as long again.
        mode: ``"eval"``: forward passes and losses in eval mode, without gradients, beside the
            gradients and optimizer states of a training. ``"inference"``: those of the model alone.
        eval_batch_size: also run a validation after every step, with batches of this size.
            Default: none, or a ``transformers.Trainer``'s own if it has an ``eval_dataset``.
        time_limit: seconds after which the search ends with the largest size confirmed by then. A
            step that is running is not interrupted. Default: no limit.
        on_probe: called with each :class:`Probe` as it ends.

    Returns:
        The answer with its evidence. Its ``status`` is ``NOTHING_FITS``, and its ``batch_size``
        0, if not even the smallest size fits; ``TIME_LIMIT`` if the time limit ended the search.

    Warns:
        BatchFinderWarning: of each of the result's ``warnings``.

    Raises:
        UsageError: an argument makes no sense.
        SampleError, StepError, DeviceError: see :mod:`batchfinder.errors`.
        RankError: the ranks of the job ask for different things, or one does not make this call.
        BatchTooSmallError: a layer needs more than one example, and no larger size is allowed.
        TimeLimitError: no size was confirmed within the time limit.
        WorkerError: worker processes end, whatever the size.
        Exception: what the model or one of the functions raises, other than running out of memory.
        UserCodeError: the same from a fork of this process, as mostly on the CPU.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1024, 1024)
        >>> sample = torch.randn(8, 1024), torch.randn(8, 1024)
        >>> find_max_batch(model, sample, device="cpu", max_batch_size=64).batch_size
        64
    """
    # Only now: the command line asks for this module before it needs torch.
    from batchfinder.probing.choose import choose_prober, strategy_of_this_job
    from batchfinder.probing.ranks.ranked import RankedProber
    from batchfinder.training.completion import completed
    from batchfinder.training.setup import setup_of

    deadline = deadline_in(time_limit)
    setup, warnings = completed(
        setup_of(model, sample, loss_fn, optimizer, step, make_batch, loader)
    )
    bounds = whole_bounds(min_batch_size, max_batch_size, multiple_of)
    check_bounds(*bounds)
    options = ProbeOptions(
        device=None if device is None else str(device),
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        headroom=headroom,
        precision=precision,
        accumulate=accumulate,
        compiled=compile,
        confirm_steps=confirm_steps,
        batch_dim=batch_dim or 0,
        strategy=strategy or strategy_of_this_job(setup.model),
        mode=mode,
        eval_batch_size=eval_batch_size,
    )
    if deadline is not None and options.strategy is not None:
        raise UsageError("time_limit is for a single process: the clocks of ranks differ")
    estimate = partial(_estimate_here, setup, options)
    with closing(choose_prober(setup, options)) as prober:
        try:
            result = run_search(
                prober,
                min_batch_size=bounds[0],
                max_batch_size=bounds[1],
                multiple_of=bounds[2],
                on_probe=on_probe,
                measures_throughput=throughput,
                deadline=deadline,
                head_start=HeadStart(
                    estimate if start_from_estimate else None, rehearsal_of(prober)
                ),
            )
            result = replace(
                result,
                warnings=(*warnings, *result.warnings),
                mode=mode,
                eval_batch_size=eval_batch_size,
            )
            if isinstance(prober, RankedProber):
                result = prober.agreed(result)
        except UserCodeError as error:
            # Their traceback, which is its cause, says it all; our frames would only follow.
            raise error.with_traceback(None) from error.__cause__
    warn_of(result.warnings)
    return result


def _estimate_here(
    setup: TrainingSetup, options: ProbeOptions, device: str, budget_bytes: int, bounds: Bounds
) -> tuple[int | None, list[str]]:
    from batchfinder.simulation.guess import guess_batch_size  # takes a moment, seldom needed

    return guess_batch_size(setup, options, device, budget_bytes, bounds)
