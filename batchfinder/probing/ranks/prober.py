"""Probe on all ranks of a job at once, each in its own worker process.

The processes that torchrun starts never touch a device. Each one supervises one worker, and the
workers of all ranks train together in their own process group. The supervisors agree on the outcome
through a store, whatever state the workers are in.

A rank that runs out of memory leaves the others waiting for it inside a collective. Their
supervisors learn of it through the store and end the waiting workers. The next probe gets fresh
workers in a fresh group, and the search continues. A step counts as hung :data:`HANG_SECONDS` after
the slowest step so far would have ended, and later if steps may compile.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from batchfinder.errors import BatchFinderError, RankError
from batchfinder.probing.attempt import Attempt
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.place import Place
from batchfinder.probing.ranks.consensus import RankedProber
from batchfinder.probing.ranks.meeting import Meeting
from batchfinder.probing.workers.group import GroupInvitation, accelerator_number
from batchfinder.probing.workers.hung import StepTimes
from batchfinder.probing.workers.process_worker import ProcessWorker
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.probing.workers.supervisor import Supervisor
from batchfinder.probing.workers.worker import EstimateOrder, Order
from batchfinder.results.probe import Outcome, Probe

# A step counts as hung this many seconds after it should have ended. The first step of all has more
# time, because it may compile kernels.
HANG_SECONDS = 30.0
FIRST_STEP_SECONDS = 600.0

# PyTorch for ROCm reads this variable too.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# After one rank has failed, the others have this many seconds to report their own failures before
# their workers are ended.
GRACE_SECONDS = 1.0

T = TypeVar("T")


class RankProber(RankedProber, Supervisor):
    """Tries sizes on all ranks; see :class:`~batchfinder.search.prober.Prober`.

    Every rank runs the same search on the same probes, so all ranks get the same answer.

    Args:
        worker: tries the sizes of this rank.
        source: the source from which the workers load the setup.
        options: the options of the search, with a strategy. On the CPU, the ranks of a machine
            share the memory limit. The limit may differ between ranks.
        meeting: the meeting of the ranks.
        estimate: the estimate to make during the steps; None for no estimate.

    Raises:
        RankError: the ranks ask for different things, or a rank did not arrive.
        BatchFinderError, UserCodeError: a worker raised it while loading the setup, or died.
    """

    def __init__(
        self,
        worker: ProcessWorker,
        source: SetupSource,
        options: ProbeOptions,
        meeting: Meeting,
        estimate: EstimateOrder | None = None,
    ) -> None:
        self.meeting, self._rank_worker = meeting, worker
        self._groups = count()
        self._store: TCPStore | None = None
        try:
            meeting.agree(_asked_for(source, options))
            self._address = self._open_store()
            seen = [socket.gethostname(), os.environ.get(VISIBLE_DEVICES, "")]
            self._accelerator = accelerator_number(meeting.job, meeting.gather(seen))
        except BaseException:
            meeting.leave("it has ended there")
            raise
        super().__init__(worker, options, estimate)

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        return self._probe(batch_size, confirm)

    def estimate(self) -> tuple[int | None, list[str]]:
        """Return the smallest of the ranks' estimates; see :class:`Supervisor`."""
        said = self.meeting.gather(super().estimate())
        sizes = [size for size, _ in said]
        return None if None in sizes else min(sizes), said[0][1]

    def close(self) -> None:
        super().close()
        self.meeting.leave("it has ended there")
        self._store = None

    def _is_doubtful(self, attempt: Attempt) -> bool:
        # As with a single worker. A failure may also come from the network.
        return attempt.is_doubtful or attempt.probe.outcome is Outcome.FAILED

    def _attempt(self, batch_size: int, confirm: bool) -> Attempt:
        self._agree_to_try(batch_size, confirm)
        if not self._is_fit or (confirm and self._is_used):
            self._start()
        self._is_fit = False  # in case an error is raised

        attempt = self._tried(partial(self._rank_worker.attempt, batch_size, confirm), batch_size)
        said = self.meeting.gather(attempt.to_dict())
        common = self._consensus(said, batch_size, confirm)
        self._take_note(common)
        own = self._budgets[self.meeting.job.rank]
        self.options = replace(self.options, budget_bytes=own)
        return common

    def _start(self) -> Place:
        """Start a worker on each rank, all in one new group, and return their common place."""
        started = time.monotonic()
        group = GroupInvitation(
            str(next(self._groups)), *self._address, self._accelerator, self.meeting.job
        )
        order = Order(self.options, asdict(group), self._estimate_order)
        own = self._tried(partial(self._rank_worker.start, order))
        place = self._common_place(own, self._rank_worker.notes.texts, self.options.strategy)
        assert isinstance(own, Place)  # else it has raised the error
        self._take_note_of_start(own)
        self.seconds_by_part["loading"] += time.monotonic() - started
        return place

    def _tried(self, action: Callable[[Callable[[], bool]], T], batch_size: int = 0) -> T | Attempt:
        """Run an action of this rank alone. Alarm the other ranks if it fails."""
        done: T | Attempt
        try:
            done = action(_patience(self.meeting))
        except RankError:
            raise
        except BatchFinderError as error:
            done = Attempt.of_error(error, batch_size)
        if isinstance(done, Attempt) and not (done.has_ended and done.probe.fits):
            self.meeting.raise_alarm()
        return done

    def _open_store(self) -> tuple[str, int]:
        """Return host and port of the workers' store. Rank 0 serves it for the whole search."""
        job = self.meeting.job
        host = socket.gethostname()
        if job.rank == 0:
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        address = os.environ.get("MASTER_ADDR") or socket.getfqdn()
        said = self.meeting.gather([host, address, self._store.port if self._store else 0])
        _, address, port = said[0]
        is_one_machine = {one for one, *_ in said} == {host}
        return "localhost" if is_one_machine else address, port


def times_of_ranks() -> StepTimes:
    """Return the times after which the step of a rank counts as hung, before any has run."""
    return StepTimes(FIRST_STEP_SECONDS, factor=1, margin_seconds=HANG_SECONDS, least_seconds=0)


def _patience(meeting: Meeting) -> Callable[[], bool]:
    """Return a function that returns True once another rank has failed, GRACE_SECONDS ago."""
    deadline = math.inf

    def has_ended() -> bool:
        nonlocal deadline
        if math.isinf(deadline) and meeting.is_alarmed():
            deadline = time.monotonic() + GRACE_SECONDS
        return time.monotonic() > deadline

    return has_ended


def _asked_for(source: SetupSource, options: ProbeOptions) -> dict[str, Any]:
    """Return the requests that must be equal on all ranks: all but the memory limit and budget."""
    asked = {f"the option {name}": value for name, value in asdict(options).items()}
    del asked["the option memory_limit"], asked["the option budget_bytes"]
    asked["the smallest batch size"] = asked.pop("the option smallest")
    return {
        "the target": source.target,
        "the target's arguments": dict(source.arguments),
        "the sample": source.sample or source.input_spec,
        "the optimizer": source.optimizer,
        **asked,
    }
