"""Probing on all ranks of a job at once, each in a worker process of its own.

The processes that torchrun starts never touch a device: each supervises one worker, and the workers
of all ranks train together in a process group of theirs. A verdict is the worst of all ranks; the
supervisors agree on it through a store, whatever state the workers are in.

One rank that runs out of memory leaves the others waiting for it inside a collective, for ever as
far as they know. Their supervisors do know: they end them, and the next probe gets fresh workers in
a fresh group, while the search goes on where it was. A hang is noticed :data:`HANG_SECONDS` after
the slowest step seen so far would have ended; later where steps may compile.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from batchfinder.errors import BatchFinderError, RankError
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.ranks.consensus import RankReport, check_none_raised
from batchfinder.probing.ranks.meeting import Meeting
from batchfinder.probing.ranks.ranked import RankedProber
from batchfinder.probing.workers.group import GroupInvitation, accelerator_number
from batchfinder.probing.workers.source import SetupSource
from batchfinder.probing.workers.step_times import StepTimes
from batchfinder.probing.workers.supervisor import Supervisor
from batchfinder.probing.workers.verdict import Verdict
from batchfinder.results.result import Outcome, Probe

# A step is taken for hung this long after it should have ended. Of the first step of all nobody
# knows how long it takes: it may well compile kernels.
HANG_SECONDS = 30.0
FIRST_STEP_SECONDS = 600.0

# PyTorch for ROCm heeds it too.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# Once one rank has failed, the others may say so too before they are ended.
GRACE_SECONDS = 1.0


class RankProber(RankedProber):
    """Tries sizes on all ranks; see :class:`~batchfinder.search.prober.Prober`.

    Every rank runs the same search on the same probes, and so comes to the same end.

    Args:
        source: where the workers get the setup from.
        options: of the search, with a strategy. A memory limit on the CPU is shared by the ranks of
            a machine; it may differ between ranks.
        meeting: of the ranks.
        probe_timeout_seconds: after which a probe is taken for hung; None: by the steps seen.
        show_output: whether what the user's code prints is passed on to standard error.

    Raises:
        RankError: the ranks do not ask for the same, or one did not arrive.
        BatchFinderError: what a worker raised on loading the setup.
        UserCodeError: the user's code raised on loading.
        WorkerError: a worker died on loading.
    """

    def __init__(
        self,
        source: SetupSource,
        options: ProbeOptions,
        meeting: Meeting,
        *,
        probe_timeout_seconds: float | None = None,
        show_output: bool = False,
    ) -> None:
        super().__init__(meeting)
        self._groups = count()
        self._store: TCPStore | None = None
        self._supervisor = Supervisor(
            source,
            options,
            probe_timeout_seconds=probe_timeout_seconds,
            show_output=show_output,
            step_times=StepTimes(
                FIRST_STEP_SECONDS, factor=1, margin_seconds=HANG_SECONDS, least_seconds=0
            ),
        )
        try:
            meeting.agree(_asked_for(source, options))
            self._address = self._open_store()
            seen = [socket.gethostname(), os.environ.get(VISIBLE_DEVICES, "")]
            self._accelerator = accelerator_number(meeting.job, meeting.gather(seen))
            self._tell(self._start_workers(), options.strategy)
        except BaseException:
            self.close()
            raise

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        # As in a single worker; and what looks like a failure may be one of the network.
        return self._supervisor.ask_twice(lambda: self._attempt(batch_size, confirm), _is_uncertain)

    def close(self) -> None:
        self._supervisor.close()
        self._meeting.leave("it has ended there")
        self._store = None

    def _attempt(self, batch_size: int, confirm: bool) -> Verdict:
        self._agree_to_try(batch_size, confirm)
        if confirm:
            self._supervisor.end_worker()
        if not self._supervisor.has_worker:
            self._start_workers()

        def attempt(is_given_up: Callable[[], bool]) -> RankReport:
            verdict = self._supervisor.attempt(batch_size, confirm, is_given_up)
            return RankReport(verdict, warnings=self._supervisor.warnings)

        verdict = self._verdict(self._meeting.gather(self._do(attempt)), batch_size, confirm)
        self._supervisor.take_note(verdict)
        return verdict

    def _start_workers(self) -> list[dict[str, Any]]:
        """A worker for each rank, all in one new group; what each of them tells."""
        job = self._meeting.job
        host, port = self._address
        invitation = GroupInvitation(
            str(next(self._groups)),
            host,
            port,
            job.rank,
            job.world_size,
            self._accelerator,
            job.local_world_size,
        )
        ready: dict[str, Any] = {}

        def start(is_given_up: Callable[[], bool]) -> RankReport:
            ready.update(self._supervisor.start(invitation.to_dict(), is_given_up))
            return RankReport(warnings=self._supervisor.warnings)

        said = self._meeting.gather([self._do(start), ready])
        reports = [RankReport.from_dict(report) for report, _ in said]
        check_none_raised(reports)
        lost = next((report.lost for report in reports if report.lost), None)
        if lost is not None:
            raise RankError(f"the workers could not form a process group: {lost}")
        return [told for _, told in said]

    def _do(self, action: Callable[[Callable[[], bool]], RankReport]) -> dict[str, Any]:
        """Something that only this rank does, and how it ended; the others hear of a bad end."""
        try:
            report = action(_Patience(self._meeting).has_ended)
        except RankError:
            raise
        except BatchFinderError as error:
            report = RankReport.of_error(error)
        if not report.is_good:
            self._meeting.raise_alarm()
        return report.to_dict()

    def _open_store(self) -> tuple[str, int]:
        """Where the workers find each other: a store that rank 0 serves for the whole search."""
        job = self._meeting.job
        host = socket.gethostname()
        if job.rank == 0:
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        address = os.environ.get("MASTER_ADDR") or socket.getfqdn()
        hosts = self._meeting.gather([host, address])
        port = self._meeting.gather(self._store.port if self._store is not None else 0)[0]
        is_one_machine = {one for one, _ in hosts} == {host}
        return "localhost" if is_one_machine else hosts[0][1], port


class _Patience:
    """For as long as others may still say why they failed, a worker is left to itself."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._deadline: float | None = None

    def has_ended(self) -> bool:
        """Whether another rank's failure has made this rank's work useless."""
        if self._deadline is None and self._meeting.is_alarmed():
            self._deadline = time.monotonic() + GRACE_SECONDS
        return self._deadline is not None and time.monotonic() > self._deadline


def _is_uncertain(verdict: Verdict) -> bool:
    return not verdict.is_certain or verdict.probe.outcome is Outcome.FAILED


def _asked_for(source: SetupSource, options: ProbeOptions) -> dict[str, Any]:
    """What all ranks have to ask for alike: all but how much memory there is."""
    asked = {f"the option {name}": value for name, value in options.to_dict().items()}
    del asked["the option memory_limit"], asked["the option budget_bytes"]
    return {
        "the target": source.target or "a pickled one",
        "the target's arguments": dict(source.arguments),
        "the sample": source.sample or source.input_spec,
        "the optimizer": source.optimizer,
        **asked,
    }
