"""Probing DistributedDataParallel in the processes of the user's own script.

A rank that runs out of memory must not leave the others in a collective, as nobody could free these
processes from it. So the forward and backward pass of a size run without any; then the ranks meet,
outside the device and its collectives; and only if all of them have survived, they synchronise
gradients, by a pass of the smallest batch. What that needs has just been given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from batchfinder.errors import BatchFinderError, UserCodeError
from batchfinder.probing.devices.choose import choose_device
from batchfinder.probing.devices.device import budget
from batchfinder.probing.in_process import InProcessProber
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.ranks.consensus import RankReport, check_none_raised
from batchfinder.probing.ranks.meeting import Meeting
from batchfinder.probing.ranks.ranked import RankedProber
from batchfinder.probing.session import ProbeSession
from batchfinder.probing.workers.group import facts_of, shared
from batchfinder.probing.workers.verdict import Verdict
from batchfinder.results.result import Probe
from batchfinder.training.placement import move_to_device
from batchfinder.training.sample import move_batch
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.step import TrainingStep
from batchfinder.training.user_traceback import user_traceback


class InProcessRankProber(RankedProber):
    """Tries sizes in the processes of a job; see :class:`~batchfinder.search.prober.Prober`.

    Args:
        setup: what to train, wrapped in DistributedDataParallel or not.
        options: of the search, with the strategy ``"ddp"``.
        meeting: of the ranks.

    Raises:
        RankError: the ranks do not ask for the same, or one did not arrive.
        SampleError, StepError, DeviceError, UsageError: as the parts of the setup do, on any rank.
    """

    def __init__(self, setup: TrainingSetup, options: ProbeOptions, meeting: Meeting) -> None:
        super().__init__(meeting)
        told: dict[str, Any] = {}

        def prepare() -> RankReport:
            self._alone = _OneOfMany(setup, _with_share(setup, options, meeting), meeting)
            told.update(self._alone.tell())
            return RankReport(warnings=self._alone.warnings)

        said = meeting.gather([_reported(prepare), told])
        check_none_raised([RankReport.from_dict(report) for report, _ in said])
        self._tell([one for _, one in said], options.strategy)

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        self._agree_to_try(batch_size, confirm)
        raised: list[Exception] = []

        def attempt() -> RankReport:
            try:
                probe = self._alone.probe(batch_size, confirm=confirm)
            except (_AnotherHasEndedError, BatchFinderError):
                raise
            except Exception as error:  # noqa: BLE001 - raised again once the others know
                raised.append(error)
                line = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise UserCodeError(line, user_traceback(error)) from None
            verdict = Verdict(probe, is_certain=True, is_reusable=True)
            return RankReport(verdict, warnings=self._alone.warnings)

        report = _reported(attempt)
        if not report["lost"]:
            self._alone.tell_end()
        said = self._meeting.gather(report)
        if raised:
            raise raised[0]  # their own exception, as it came
        probe = self._verdict(said, batch_size, confirm).probe
        if not probe.fits:
            # Some may have got further than others: all start over from the same place.
            self._alone.close()
        return probe

    def close(self) -> None:
        if hasattr(self, "_alone"):
            self._alone.close()
        self._meeting.leave("it has ended there")


class _OneOfMany(InProcessProber):
    """One rank's share of the work: all that it says to the others is whether it goes on."""

    def __init__(self, setup: TrainingSetup, options: ProbeOptions, meeting: Meeting) -> None:
        super().__init__(setup, options)
        self._meeting = meeting

    def tell(self) -> dict[str, Any]:
        """What a worker would tell."""
        return {
            "device": self.device,
            "budget_bytes": self.budget_bytes,
            "capacity_bytes": self.capacity_bytes,
            "used_by_others_bytes": self.used_by_others_bytes,
            "is_repeatable": self.is_repeatable,
            "versions": self.versions,
            "limit_warning": self._device.limit_warning,
            "facts": facts_of(self.setup, self._batches, self._device),
        }

    def tell_end(self) -> None:
        """Say that this rank's probe has ended, to those who may still be in the middle of it."""
        self._meeting.gather(None)

    def _new_session(self) -> ProbeSession:
        smallest = self.options.warm_up_batch_size
        return ProbeSession(
            self.setup,
            self._batches,
            self._device,
            self.budget_bytes,
            self.options,
            all_agree=self._all_agree,
            make_step=partial(
                _StepInTwoParts,
                survived=self._all_agree,
                small_batch=None if smallest is None else partial(self._batches.make, smallest),
            ),
        )

    def _all_agree(self, yes: bool) -> bool:
        said: list[bool | None] = self._meeting.gather(yes)
        if None in said:
            raise _AnotherHasEndedError(said.index(None))
        return all(said)


class _StepInTwoParts(TrainingStep):
    """A step that synchronises gradients once all ranks have survived all else."""

    def __init__(
        self,
        setup: TrainingSetup,
        device: torch.device,
        *,
        survived: Callable[[bool], bool],
        small_batch: Callable[[], Any] | None,
        **options: Any,
    ) -> None:
        # The model itself may be too large for one of them; wrapping it takes all.
        move_to_device(setup, device)
        survived(True)
        super().__init__(setup, device, **options)
        self._survived = survived
        self._small_batch = small_batch

    def forward_backward(self, batch: Any, after_forward: Callable[[], Any] = lambda: None) -> None:
        with self._model.no_sync():
            super().forward_backward(batch, after_forward)
        self._survived(True)
        if not self.trains_itself:
            # As at the start of any step: beside them there was no room for a forward pass.
            self.optimizer.zero_grad(set_to_none=True)
        kept = self._kept
        small = batch if self._small_batch is None else self._small_batch()
        super().forward_backward(move_batch(small, self.device))
        self._kept = kept


class _AnotherHasEndedError(BatchFinderError):
    """Another rank's probe has ended, so this one is of no use."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"stopped, as rank {rank} had failed")


def _with_share(setup: TrainingSetup, options: ProbeOptions, meeting: Meeting) -> ProbeOptions:
    """The options, with the budget where ranks share the memory of a machine."""
    device = choose_device(options.device, setup.model)
    if device.torch_device.type != "cpu":
        return options
    memory, shared_options = shared(device.memory(), options, meeting.job.local_world_size)
    limit, headroom = shared_options.memory_limit, options.headroom
    return replace(options, budget_bytes=budget(memory, limit, headroom))


def _reported(action: Callable[[], RankReport]) -> dict[str, Any]:
    """What came of something that only this rank does, for the others."""
    try:
        report = action()
    except _AnotherHasEndedError as end:
        report = RankReport(lost=str(end))
    except BatchFinderError as error:
        report = RankReport.of_error(error)
    return report.to_dict()
