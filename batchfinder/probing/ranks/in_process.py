"""Probe DistributedDataParallel in the processes of the user's own script.

A rank that runs out of memory must not leave the others in a collective, because nothing could free
these processes from it. So the forward and backward pass of a size run without those of
DistributedDataParallel, and the ranks meet before each collective of the user's own step, such as a
loss over the examples of all. Once, all ranks synchronize the gradients of the smallest batch,
which each has run alone before. The CPU's heap may have memory for it in holes only, so there no
limit holds in that pass.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchfinder.errors import BatchFinderError, UserCodeError
from batchfinder.probing.attempt import Attempt
from batchfinder.probing.notes import Notes
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.ranks.consensus import RankedProber
from batchfinder.probing.ranks.meeting import Meeting
from batchfinder.probing.workers.here import Here
from batchfinder.probing.workers.supervisor import NOT_CLEAN_WARNING
from batchfinder.probing.workers.worker import Order, Ranks
from batchfinder.results.probe import Probe
from batchfinder.results.result import BatchSizeResult
from batchfinder.training.parallel import ranks, uncompiled
from batchfinder.training.placement import move_to_device
from batchfinder.training.sample import BatchMaker, move_batch
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state.patching import replaced
from batchfinder.training.step import TrainingStep
from batchfinder.training.step_source import Kept
from batchfinder.training.user_traceback import error_line, user_traceback

# Gradients are synchronized before this step: a training does so first at the end of step 1.
SYNCHRONIZED_STEP = 2

# The methods of a process group that begin a collective, by their names.
_COLLECTIVE = re.compile("gather|reduce|scatter|broadcast|barrier|all_?to_?all")

# DistributedDataParallel makes its buckets anew in the second step. In a new process, that splits
# blocks of the allocator's cache. A model whose gradients need 9.5 % of the budget was answered
# with 4585, which trained in that process; new ones train with 3956 at most. Where gradients need
# 0.8 %, there was no difference.
GRADIENTS_SHARE = 0.05
BUCKETS_NOTE = (
    "the answer holds for this process, where DistributedDataParallel has its buckets already: in "
    "a new one, up to 14 % less may fit. For that, try torchrun -m batchfinder find --strategy ddp,"
    " or find_max_batch() before the model is wrapped"
)

T = TypeVar("T")


class InProcessRankProber(RankedProber):
    """Tries sizes in the processes of a job; see :class:`~batchfinder.search.prober.Prober`.

    Args:
        setup: the training setup. Its model may be wrapped in DistributedDataParallel.
        options: the options of the search, with the strategy ``"ddp"``.
        meeting: the meeting of the ranks.

    Raises:
        RankError: the ranks run different searches, or a rank did not arrive.
        SampleError, StepError, DeviceError, UsageError: a part of the setup is unusable on a rank.
    """

    def __init__(self, setup: TrainingSetup, options: ProbeOptions, meeting: Meeting) -> None:
        self.meeting, self.notes, self.seconds_by_part = meeting, Notes(), {}
        ranks = Ranks(meeting.job.local_world_size, self._all_agree, self._make_step)
        self._alone = Here(setup, ranks=ranks)
        own = _tried(partial(self._alone.start, Order(options)))
        self.settle(self._common_place(own, (), options.strategy))
        is_large = has_large_buckets(setup.model, self.budget_bytes)
        self._remarks = (BUCKETS_NOTE,) if is_large and self.is_repeatable else ()

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        self._agree_to_try(batch_size, confirm)
        raised: list[Exception] = []

        def attempt() -> Attempt:
            try:
                # Each rank has only this process, so its result must count as from a new one.
                with _met_before_collectives(self._all_agree):
                    attempt = self._alone.attempt(batch_size, confirm)
                doubt = (NOT_CLEAN_WARNING,) if attempt.is_doubtful else ()
                warnings = (*attempt.warnings, *doubt)
                return replace(attempt, is_believed=True, is_reusable=True, warnings=warnings)
            except (_AnotherHasEndedError, BatchFinderError):
                raise
            except Exception as error:  # noqa: BLE001 - raised again once the others know
                raised.append(error)
                raise UserCodeError(error_line(error), user_traceback(error)) from None

        tried = _tried(attempt, batch_size)
        if not tried.lost:
            self.meeting.gather(None)  # tells the ranks in the middle of the probe
        said = self.meeting.gather(tried.to_dict())
        if raised:
            raise raised[0]  # the user's own exception, unchanged
        probe = self._consensus(said, batch_size, confirm).probe
        if not probe.fits:
            # Some ranks may have got further than others, so all start over from the same state.
            self._alone.end()
            gc.collect()  # a rank that was stopped has ended within its step, which held all
        return probe

    def agreed(self, result: BatchSizeResult) -> BatchSizeResult:
        result = super().agreed(result)
        return replace(result, notes=(*result.notes, *self._remarks))

    def close(self) -> None:
        self._alone.end()
        self.meeting.leave("it has ended there")

    def _make_step(
        self, batches: BatchMaker, smallest: int | None, *args: Any, **options: Any
    ) -> TrainingStep:
        return _StepWithoutCollectives(
            *args,
            survived=self._all_agree,
            make_small=lambda batch_size: batches.make(smallest or batch_size),
            around_small_passes=self._alone.limit_lifted_on_heap,
            **options,
        )

    def _all_agree(self, yes: bool) -> bool:
        said: list[bool | None] = self.meeting.gather(yes)
        if None in said:
            raise _AnotherHasEndedError(said.index(None))
        return all(said)


def has_large_buckets(model: nn.Module, budget_bytes: int) -> bool:
    """Return True if a model is wrapped, and the wrapper's buckets may fragment a budget."""
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    is_wrapped = isinstance(uncompiled(model), DistributedDataParallel)
    return is_wrapped and gradients > GRADIENTS_SHARE * budget_bytes


def _met_before_collectives(all_agree: Callable[[bool], bool]) -> AbstractContextManager[Any]:
    """Let all ranks meet before each collective that Python begins while the block runs.

    There the others learn of a rank that has failed, and end their step instead of waiting for it.
    """

    def met(begin: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(begin)
        def meet_and_begin(group: Any, *arguments: Any, **options: Any) -> Any:
            if group.size() == ranks():  # a part of the ranks cannot meet all of them
                all_agree(True)
            return begin(group, *arguments, **options)

        return meet_and_begin

    methods = {
        name: one for name, one in vars(dist.ProcessGroup).items() if _COLLECTIVE.search(name)
    }
    return replaced(dist.ProcessGroup, **{name: met(one) for name, one in methods.items()})


class _StepWithoutCollectives(TrainingStep):
    """A step whose ranks train each for itself. They synchronize only small batches, and only once.

    DistributedDataParallel replaces its buckets in the forward pass after that.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        device: torch.device,
        *,
        survived: Callable[[bool], bool],
        make_small: Callable[[int], Any],
        around_small_passes: Callable[[], AbstractContextManager[None]],
        **options: Any,
    ) -> None:
        # The model itself may be too large for one rank. Wrapping it is a collective of all ranks.
        move_to_device(setup, device)
        survived(True)
        super().__init__(setup, device, **options)
        self._survived = survived
        self._make_small = make_small
        self._around_small_passes = around_small_passes
        self._steps = 0
        self._must_meet = True  # before the next forward pass, as it begins with collectives

    def fetch(self, next_batch: Callable[[], Any]) -> Iterator[Any]:
        self._steps += 1
        if self._steps == SYNCHRONIZED_STEP:
            self._synchronize()
        return super().fetch(next_batch)

    def forward_backward(self, batch: Any, after_forward: Callable[[], Any] = lambda: None) -> None:
        if self._must_meet:
            self._survived(True)
            self._must_meet = False
        with self._model.no_sync():
            super().forward_backward(batch, after_forward)

    def release(self) -> None:
        super().release()
        self._must_meet = True
        ddp: Any = uncompiled(self._model)
        ddp.require_forward_param_sync = True

    def _synchronize(self) -> None:
        """Synchronize the gradients of the smallest batch, which each rank tries alone before."""
        kept, had_gradients = self._kept, self._has_old_gradients
        with self._around_small_passes():
            batch = move_batch(self._make_small(self._batch_size), self.device)
            for run in (self.forward_backward, super().forward_backward):
                self._kept = Kept()
                run(batch)
                if not (had_gradients or self.trains_itself):
                    self.optimizer.zero_grad(set_to_none=True)
                self._survived(True)
        self._kept, self._has_old_gradients = kept, had_gradients
        self._must_meet = True


class _AnotherHasEndedError(BatchFinderError):
    """Another rank's probe has ended, so this rank's probe is useless."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"stopped, as rank {rank} had failed")


def _tried(action: Callable[[], T], batch_size: int = 0) -> T | Attempt:
    """Run an action of this rank alone. If it raises an error, return the record of it."""
    try:
        return action()
    except _AnotherHasEndedError as end:
        return replace(Attempt.of_error(end, batch_size), error=None, lost=str(end))
    except BatchFinderError as error:
        return Attempt.of_error(error, batch_size)
