"""A training step that survives out-of-memory errors by splitting its batch."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tenacity import RetryCallState, Retrying, retry_if_result
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfinder.errors import BatchFinderWarning, DeviceError, UsageError
from batchfinder.integrations.changed_buffers import ChangedBuffers
from batchfinder.integrations.ranks import average_gradients, least_of_ranks, unsynchronized
from batchfinder.integrations.split_batch import examples_in, split_batch, tokens_in
from batchfinder.integrations.whole_update import refuse_updates_in_backward, update
from batchfinder.probing.devices.choose_device import choose_device
from batchfinder.probing.devices.oom import classify
from batchfinder.probing.devices.oom_table import Tier
from batchfinder.probing.too_small import needs_more_than_one_sample
from batchfinder.training.optimizer import parameters_of
from batchfinder.training.parallel import ranks, waits_within_passes
from batchfinder.training.sample import move_batch, unclear_parts
from batchfinder.training.setup import LossFunction, TrainingSetup
from batchfinder.training.step_source import PlainLoop, checked_loss
from batchfinder.training.tree import described_shapes, named_tensors
from batchfinder.units import positive


@dataclass
class _Failure:
    """An out-of-memory error: the number of examples that caused it, and its text."""

    size: int
    reason: str


class OOMGuard:
    """Run optimizer steps that survive out-of-memory errors.

    A step that runs out of memory is dropped whole, then repeated with its batch split into parts
    whose gradients add up to those of the whole batch, if the loss is a mean over examples, or a
    Transformers model's own over tokens. (Of other means over tokens, those of shorter texts count
    too much.) The size that worked is kept, and doubled after some steps without an error.

    With DistributedDataParallel all ranks split alike, and gradients are averaged after the
    backward pass, not during it. Call :meth:`step` under ``torch.autocast`` for mixed precision.
    Where your loop clips gradients or uses a GradScaler, call :meth:`backward` and step the
    optimizer yourself.

    Args:
        model: the module to train, on its device; may be wrapped in DistributedDataParallel.
        optimizer: an optimizer of the model's parameters.
        loss_fn: ``loss_fn(output, batch) -> loss``, a mean over the examples. Default: the same
            rules as for :func:`~batchfinder.find_max_batch`.
        batch_size: the most examples in one forward pass. Default: the whole batch.
        grow_after: steps without an error after which this number is doubled. The wait doubles too
            each time that the larger number fails. Default: 100.
        batch_dim: index of the batch dimension. Default: 0.

    Attributes:
        batch_size: the most examples in one forward pass at present; None for the whole batch.

    Raises:
        UsageError: a number is no whole number from 1 on, or the model is sharded (FSDP), has
            SyncBatchNorm on several ranks, or hooks that act within the backward pass.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> guard = OOMGuard(model, optimizer, batch_size=8)
        >>> loss = guard.step((torch.randn(32, 4), torch.randn(32, 1)))  # four parts, one step
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction | None = None,
        *,
        batch_size: int | None = None,
        grow_after: int = 100,
        batch_dim: int = 0,
    ) -> None:
        self.batch_size = None if batch_size is None else positive("batch_size", batch_size)
        self._most = self.batch_size
        self._grow_after = positive("grow_after", grow_after)
        why, strategy = waits_within_passes(model)
        if strategy == "fsdp" or (why and ranks() > 1):
            raise UsageError(
                f"the model {why}: a rank that runs out of memory within its collectives would "
                "leave the others waiting. Try a batch size that torchrun -m batchfinder "
                f"find --strategy {strategy} has confirmed"
            )
        refuse_updates_in_backward(model)
        self.model = model
        self.optimizer = optimizer
        self._weigh: Callable[[Any], int] = partial(tokens_in, model, loss_fn)
        self._loop = PlainLoop(TrainingSetup(model, loss_fn=loss_fn), _warn)
        self._batch_dim = batch_dim
        ours = {*map(id, parameters_of(optimizer))}
        self._others = [p for p in model.parameters() if id(p) not in ours]
        self._quiet_steps = 0
        self._has_grown = False
        self._is_told = False
        self._device = choose_device(next(model.parameters(), torch.zeros(())).device)
        self._buffers = ChangedBuffers(model)

    def __repr__(self) -> str:
        most = "whole batches" if self.batch_size is None else f"at most {self.batch_size} examples"
        return f"<OOMGuard: {type(self.model).__name__}, {most} in one forward pass>"

    def step(self, batch: Any) -> Tensor:
        """Clear the gradients, run forward and backward pass, and update the parameters.

        Args:
            batch: a batch as the DataLoader yields it. Its parts are moved to the model's device.

        Returns:
            The mean loss over the whole batch, detached.

        Raises:
            StepError: the loss is not a scalar that requires a gradient.
            DeviceError: not even one example fits, or the optimizer's own step has no room.
            Exception: what the model or the loss function raises, except for out-of-memory errors.
        """
        loss = self._trained_on(batch)
        update(self.optimizer)
        return loss

    def backward(self, batch: Any) -> Tensor:
        """Do as :meth:`step` does, except for the optimizer's step, which is left to you.

        Gradients of earlier calls are cleared, those of all of the model's parameters: to
        accumulate, give one larger batch. For LBFGS: ``optimizer.step(lambda: guard.backward(b))``.

        Example:
            >>> model = torch.nn.Linear(4, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> scaler = torch.amp.GradScaler("cpu")
            >>> def loss_fn(output, batch):
            ...     return scaler.scale(torch.nn.functional.mse_loss(output, batch[1]))
            >>> guard = OOMGuard(model, optimizer, loss_fn)
            >>> scaled_loss = guard.backward((torch.randn(32, 4), torch.randn(32, 1)))
            >>> scaler.unscale_(optimizer)
            >>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            >>> scaler.step(optimizer)
            >>> scaler.update()
        """
        return self._trained_on(batch)

    def _trained_on(self, batch: Any) -> Tensor:
        self._buffers.save()

        def clean_up(_: float) -> None:
            # tenacity calls this when no tensor of the failed pass is alive: its memory is freed.
            self._clear_gradients()
            gc.collect()
            self._device.release_cache()
            self._buffers.restore()

        def split(state: RetryCallState) -> None:
            assert state.outcome is not None
            self._split_after(state.outcome.result(), batch)

        ended = self._attempt(batch)
        if isinstance(ended, _Failure):  # else a step needs no tenacity, which takes 0.1 ms
            self._split_after(ended, batch)
            clean_up(0)
            failed = retry_if_result(lambda ended: isinstance(ended, _Failure))
            retrying = Retrying(retry=failed, before_sleep=split, sleep=clean_up)
            try:
                ended = retrying(self._attempt, batch)
            except Exception as error:
                if not isinstance(error, DeviceError):  # perhaps the model cannot train on parts
                    self._tell_of_first_split(batch)
                raise
        assert not isinstance(ended, _Failure)
        self._buffers.note_changes()
        self._tell_of_first_split(batch)
        self._grow_after_quiet_steps()
        return ended

    def _attempt(self, batch: Any) -> Tensor | _Failure:
        """Return the mean loss of the whole batch, or the failure of any rank."""
        ended: Tensor | _Failure
        try:
            ended = self._accumulate(batch)
        except Exception as error:
            failure = classify(error)
            is_too_small = needs_more_than_one_sample(error)
            if not is_too_small and (failure is None or failure.tier is Tier.POISONED):
                raise
            examples = examples_in(batch, self._batch_dim)
            size = min(self.batch_size or examples, examples)
            if failure is not None:
                ended = _Failure(size, failure.reason)
            elif size < examples:
                ended = _Failure(0, "a part of one example is too few for BatchNorm")
            else:
                raise
        return ended if ranks() == 1 else self._agreed(ended)

    def _accumulate(self, batch: Any) -> Tensor:
        """Add up the gradients of all parts, each weighted by its share of what the loss counts."""
        self._clear_gradients()
        total: Tensor | None = None
        parts: Iterable[tuple[Any, float]] = [(batch, 1.0)]
        if self.batch_size is not None:
            parts = split_batch(batch, self.batch_size, self._batch_dim, self._weigh)
        for part, share in parts:
            part = move_batch(part, self._device.torch_device)
            with unsynchronized(self.model):
                output = self._loop(self.model, part)
                loss = checked_loss(self._loop.loss_of(output, part), self._loop)
                if share != 1.0:
                    loss = loss * share
                loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
            del output, loss
        assert total is not None
        return total

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self._others:
            parameter.grad = None

    def _agreed(self, ended: Tensor | _Failure) -> Tensor | _Failure:
        """Fail on all ranks if one has failed; else average the gradients."""
        never = torch.iinfo(torch.int64).max
        ours = ended if isinstance(ended, _Failure) else _Failure(never, "")
        (size,) = least_of_ranks([ours.size], self._device.torch_device)
        if size != never:
            return _Failure(size, ours.reason or "another rank ran out of memory")
        average_gradients(self.model.parameters(), self._device.torch_device)
        return ended

    def _split_after(self, failure: _Failure, batch: Any) -> None:
        if failure.size <= 1:
            self._clear_gradients()
            shapes = described_shapes(named_tensors(batch))
            raise DeviceError(
                f"{'not even one example' if failure.size else 'no split'} of {shapes} fits into "
                f"memory ({failure.reason}). Try shorter sequences, activation checkpointing or a "
                "leaner optimizer"
            )
        self.batch_size = (failure.size + 1) // 2
        if self._has_grown:
            self._grow_after *= 2
        self._has_grown = False
        self._quiet_steps = 0

    def _tell_of_first_split(self, batch: Any) -> None:
        if self._is_told or self.batch_size == self._most:
            return
        self._is_told = True
        whole, part = examples_in(batch, self._batch_dim), self.batch_size
        over_examples = " if the loss is a mean over examples, not tokens"
        hooked = any(parameter._backward_hooks for parameter in self.model.parameters())
        unclear = unclear_parts(batch, whole)
        normed = "BatchNorm's statistics are those of one part at a time: try GroupNorm"
        caveats = (
            normed if self._buffers.has_norms else "",
            "Hooks of parameters see the gradients of a part" if hooked else "",
            f"Each part has all of {', '.join(unclear)}: try a tensor" if unclear else "",
        )
        warnings.warn(
            f"a batch of {whole} ran out of memory, so it is trained in parts of {part}: slower, "
            f"with the gradients of the whole batch{'' if self._weigh(batch) else over_examples}. "
            f"{'. '.join(filter(None, ('Try a smaller batch size, if that matters', *caveats)))}",
            BatchFinderWarning,
            stacklevel=4,  # the line that called step() or backward()
        )

    def _grow_after_quiet_steps(self) -> None:
        if self.batch_size is None or self.batch_size == self._most:
            return
        self._quiet_steps += 1
        if self._quiet_steps >= self._grow_after:
            self.batch_size = min(2 * self.batch_size, self._most or 2 * self.batch_size)
            self._has_grown = True
            self._quiet_steps = 0


def _warn(text: str) -> None:
    warnings.warn(text, BatchFinderWarning, stacklevel=2)
