"""``noise_scale()``: measure the gradient noise scale of a model on its data."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from batchfinder.errors import SampleError, StepError, UsageError
from batchfinder.probing.devices.choose_device import choose_device
from batchfinder.results.noise_scale import NoiseScale, noise_scale_of
from batchfinder.training.complete_setup import completed
from batchfinder.training.data.drawn import drawn_places
from batchfinder.training.data.lengths import SEED
from batchfinder.training.data.loader import examples_of
from batchfinder.training.sample import move_batch
from batchfinder.training.setup import LossFunction, StepFunction, TrainingSetup, setup_of
from batchfinder.training.state.snapshot import preserved_state
from batchfinder.training.step import TrainingStep

# A large batch is this many small ones. The paper's example is 1 to 32; a ratio of 16 leaves 6 % of
# the noise in the large gradient, and the estimate subtracts it.
RATIO = 16
LEAST_RATIO = 4  # with fewer, the two norms are too similar
SMALL = 8  # examples; batch normalization needs several
DRAWS = 8

# A loss is no mean over examples if that of a batch differs from the mean of its halves' losses by
# more than this fraction, and by more than this many standard errors.
NOT_THE_MEAN = 0.1
SURE = 4

_NEEDS_DATA = (
    "the noise scale is the difference between gradients of different examples, and a repeated "
    "sample has none. Try loader=your DataLoader or data set."
)


def noise_scale(
    model: nn.Module | TrainingSetup,
    *,
    loader: Any = None,
    loss_fn: LossFunction | None = None,
    step: StepFunction | None = None,
    device: str | None = None,
    precision: str = "fp32",
    small_batch_size: int = SMALL,
    draws: int = DRAWS,
) -> NoiseScale:
    """Measure how many examples of an optimizer step still help, at the model's current weights.

    Larger global batches than the noise scale train hardly faster per step. It is McCandlish et al.
    2018's simple noise scale, from gradient norms at two batch sizes. It is small early in training
    and grows; the loss has to be a mean over examples. The model and the loader are restored.

    Args:
        model: the module to train; or a :class:`TrainingSetup`, with the next three arguments.
        loader: your DataLoader, a data set, or ``(data set, collate function)``.
        loss_fn: ``loss_fn(output, batch) -> loss``. Default: inferred from the output.
        step: ``step(model, batch) -> loss``, in place of forward pass and loss.
        device: where to run. Default: an accelerator if there is one.
        precision: ``"fp32"``, or ``"bf16"`` for autocast.
        small_batch_size: examples in each forward/backward pass. A large batch is 16 of these.
        draws: large batches to draw, at least 2. Their spread gives the interval.

    Returns:
        The estimate: ``examples``, and its interval ``low`` to ``high``.

    Raises:
        UsageError: there is no loader, or a number is too small.
        SampleError: an epoch has too few examples.
        StepError: the step trains by itself, so its gradients cannot be read; or the loss is no
            mean over examples.
        Exception: whatever model and data raise.

    Example:
        >>> import torch
        >>> data = [(torch.randn(4), torch.randn(1)) for _ in range(256)]
        >>> 0 < noise_scale(torch.nn.Linear(4, 1), loader=data, device="cpu").low
        True
    """
    setup = setup_of(model, None, loss_fn, None, step, None, loader)
    if setup.loader is None:
        raise UsageError(_NEEDS_DATA)
    data = setup.loader
    setup, _ = completed(setup)
    return measured(setup, data, device, precision, small_batch_size, draws)


def measured(
    setup: TrainingSetup, data: Any, device: str | None, precision: str, size: int, draws: int
) -> NoiseScale:
    """Measure the noise scale of a complete setup on the data of its loader.

    Raises:
        Exception: as :func:`noise_scale`.
    """
    if size < 1 or draws < 2:
        raise UsageError(f"{size} examples and {draws} draws are too few. Try 8 and 8.")
    dataset, collate, sampler = examples_of(data, "the loader")
    on = choose_device(device, setup.model).torch_device
    touched = [setup.model, setup.optimizer, *setup.functions, collate, sampler]
    with preserved_state(*touched, device=on):
        places = drawn_places(sampler if sampler is not None else range(len(dataset)))
        ratio = min(RATIO, len(places) // size // 2)
        if ratio < LEAST_RATIO:
            raise SampleError(
                f"an epoch has {len(places)} examples, too few to compare gradients. Try at least "
                f"{2 * LEAST_RATIO * size}."
            )
        parts = _parts(dataset, places, size)
        step = TrainingStep(setup, on, precision=precision)
        batches = map(collate, parts)
        pairs = [_norms(step, itertools.islice(batches, ratio)) for _ in range(draws)]
        _check_mean(step, collate, [next(parts) for _ in range(draws)])
        step.release()
    small, large = zip(*pairs, strict=True)
    return noise_scale_of(small, large, size, ratio * size, len(places))


def _parts(dataset: Any, places: list[int], size: int) -> Iterator[list[Any]]:
    """Yield different examples in random order, one pass after the other."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        order = torch.randperm(len(places), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            yield [dataset[places[i]] for i in order[start : start + size]]


def _check_mean(step: TrainingStep, collate: Any, parts: list[list[Any]]) -> None:
    """Refuse a loss that is not a mean over examples, where a batch's is the mean of its halves'.

    Dropout makes the two differ by chance, and batch normalization makes them differ a little.
    """
    wholes, means = list[float](), list[float]()
    for examples in parts:
        half = len(examples) // 2
        if not half:
            return
        pieces = (examples[: 2 * half], examples[:half], examples[half : 2 * half])
        whole, *halves = (_loss(step, collate(piece)) for piece in pieces)
        wholes.append(whole)
        means.append(statistics.mean(halves))
    apart = [whole - mean for whole, mean in zip(wholes, means, strict=True)]
    whole, mean = statistics.mean(wholes), statistics.mean(means)
    error = statistics.stdev(apart) / math.sqrt(len(apart))
    if abs(whole - mean) > max(NOT_THE_MEAN * abs(whole), SURE * error):
        raise StepError(
            f"the loss of {2 * half} examples is {whole:.3g}, and {mean:.3g} on average for each "
            "half of them. So it depends on the rest of the batch, as contrastive losses do, or is "
            "a sum, and has no noise scale. Try a mean over examples, or leave it out."
        )


def _loss(step: TrainingStep, batch: Any) -> float:
    loss = step.forward(move_batch(batch, step.device))
    assert loss is not None  # a step that trains by itself has been refused
    return loss.item()


def _norms(step: TrainingStep, batches: Iterator[Any]) -> tuple[float, float]:
    """Return the mean squared norm of the gradients of some batches, and that of their mean."""
    total: dict[Tensor, Tensor] = {}
    norms: list[float] = []
    for batch in batches:
        step.forward_backward(move_batch(batch, step.device))
        if step.trains_itself:
            raise StepError(
                "the step trains by itself, so its gradients are gone when it ends. Try a step "
                "that returns the loss."
            )
        squares = 0.0
        for parameter in step.setup.model.parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            squares += _squared(gradient)
            known = total.get(parameter)
            total[parameter] = gradient.clone() if known is None else known.add_(gradient)
        norms.append(squares)
        step.release()
    count = len(norms)
    large = sum(_squared(gradient) for gradient in total.values()) / count**2
    return sum(norms) / count, large


def _squared(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float32)) ** 2
