"""Find the largest batch size of a ``transformers.Trainer`` and write it into its arguments.

Transformers itself is not imported. Sources: ``Trainer.__init__`` copies the batch size to
``_train_batch_size``, and ``get_train_dataloader`` reads that copy
(https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchfinder.errors import UsageError, warn_of
from batchfinder.finder import find_max_batch
from batchfinder.results.accumulation import Split
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.training.data.loader import has_places
from batchfinder.training.frameworks.trainer_batch import size_of_batches
from batchfinder.training.setup import Trainer
from batchfinder.units import positive


def set_max_batch(
    trainer: Trainer, global_batch_size: int | None = None, **options: Any
) -> BatchSizeResult:
    """Find the largest batch size that really trains, and set it in a Trainer's arguments.

    ``per_device_train_batch_size`` and, with a global batch size, ``gradient_accumulation_steps``
    are set. Model, optimizer, scheduler, global step and random state stay as they are, so
    ``trainer.train()`` gives the same losses as with these numbers written by hand. If nothing
    fits, or an error is raised, the arguments stay as they were. The number of examples that a rank
    has is a limit too, if the data set has a length.

    Args:
        trainer: a ``transformers.Trainer`` or one of its subclasses, also TRL's.
        global_batch_size: examples per optimizer step over all ranks, reached exactly if the
            numbers allow it, else as nearly as possible, with a warning. Default: the accumulation
            steps stay as they are, and the global batch size grows with the batch size.
        **options: arguments of :func:`~batchfinder.find_max_batch`, such as ``memory_limit`` and
            ``max_batch_size``.

    Returns:
        The result of the search. Its ``notes`` name the numbers that were set.

    Raises:
        UsageError: the Trainer runs one process on several GPUs, or an option is invalid.
        StepError: the Trainer shards its model, or trains on what its model generates.
        Exception: whatever :func:`~batchfinder.find_max_batch` raises.

    Example:
        >>> result = set_max_batch(trainer, global_batch_size=256)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    if not isinstance(trainer, Trainer):
        raise UsageError(
            f"set_max_batch takes a transformers.Trainer, not an object of type "
            f"{type(trainer).__name__}. Try find_max_batch(model, sample)"
        )
    args = trainer.args
    if getattr(args, "n_gpu", 1) > 1:
        raise UsageError(
            f"this Trainer splits each batch over {args.n_gpu} GPUs in one process. Try one "
            "process per GPU: torchrun --nproc-per-node ... train.py, or CUDA_VISIBLE_DEVICES=0"
        )
    if global_batch_size is not None:
        positive("global_batch_size", global_batch_size)
    before = args.gradient_accumulation_steps
    try:
        result, split, largest = _search(trainer, global_batch_size, options)
    finally:
        args.gradient_accumulation_steps = before
    warnings = []
    failure = result.next_failure
    if failure is not None and failure.is_in_validation:
        warnings.append(
            f"a batch of {failure.batch_size} trains, but the evaluation runs out of memory. Try a "
            "smaller per_device_eval_batch_size, preprocess_logits_for_metrics, or "
            "eval_accumulation_steps=1, so that fewer results are on the device"
        )
    if split is None:
        warn_of(warnings)
        return replace(result, warnings=(*result.warnings, *warnings))
    args.per_device_train_batch_size = split.batch_size
    vars(trainer)["_train_batch_size"] = split.batch_size  # its loader reads this copy
    args.gradient_accumulation_steps = split.gradient_accumulation_steps
    note = (
        f"set per_device_train_batch_size={split.batch_size}, gradient_accumulation_steps="
        f"{split.gradient_accumulation_steps}: {split.global_batch_size} examples per step"
    )
    if result.status is Status.CAPPED and result.batch_size == _examples_of_a_rank(trainer):
        note += ", as many as the data set has for a rank"
    if largest > split.batch_size:
        note += f". A batch of {largest} fits too, but does not divide {global_batch_size} evenly"
    if global_batch_size not in (None, split.global_batch_size):
        warnings.append(
            f"a global batch size of {global_batch_size} cannot be reached; the nearest is {split}."
            " Try a multiple of the number of ranks"
        )
    if (made := size_of_batches(trainer)) not in (None, split.batch_size):
        warnings.append(
            f"get_train_dataloader of {type(trainer).__name__} makes batches of {made}, not of "
            f"{split.batch_size}. Try batch_size=self._train_batch_size in it"
        )
    warn_of(warnings)
    return replace(result, notes=(*result.notes, note), warnings=(*result.warnings, *warnings))


def _examples_of_a_rank(trainer: Trainer) -> int | None:
    dataset = trainer.train_dataset
    if not has_places(dataset):
        return None
    return max(1, len(dataset) // getattr(trainer.args, "world_size", 1))


def _search(
    trainer: Trainer, global_batch_size: int | None, options: dict[str, Any]
) -> tuple[BatchSizeResult, Split | None, int]:
    """Search until the answer was measured with the accumulation steps that it needs.

    More micro-batches per optimizer step need more memory: gradients stay during the forward pass,
    and a Trainer moves all micro-batches of a step to the device at once.

    Returns:
        The result, the numbers to set, and the largest batch size that fitted with the fewest
        accumulation steps.
    """
    args = trainer.args
    ranks = getattr(args, "world_size", 1)
    limits = [options.get("max_batch_size"), _examples_of_a_rank(trainer)]
    if global_batch_size is not None:
        limits.append(max(1, global_batch_size // ranks))
    options["max_batch_size"] = min((most for most in limits if most is not None), default=None)
    largest = 0
    while True:
        result = find_max_batch(trainer, **options)
        largest = max(largest, result.batch_size)
        if not result.batch_size:
            return result, None, largest
        steps = args.gradient_accumulation_steps
        if global_batch_size is None:
            return result, Split(result.batch_size, steps, ranks), largest
        rules = {name: options.get(name, 1) for name in ("min_batch_size", "multiple_of")}
        plan = result.accumulation_plan(global_batch_size, ranks, **rules)
        split = plan.exact or plan.nearest
        assert split is not None
        if split.gradient_accumulation_steps <= steps and split.batch_size <= result.batch_size:
            return result, split, largest
        args.gradient_accumulation_steps = split.gradient_accumulation_steps
        options["max_batch_size"] = split.batch_size
