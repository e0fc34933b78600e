"""One supervisor for all workers: reuse while clean, fresh where traces remain, ask twice in doubt.

Imports no torch.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from batchfinder.errors import BatchTooSmallError, UserCodeError, WorkerError
from batchfinder.probing.attempt import Attempt, Recording
from batchfinder.probing.notes import Notes
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.place import AtPlace, Place
from batchfinder.probing.workers.process_worker import ProcessWorker
from batchfinder.probing.workers.worker import EstimateOrder, Order, Worker
from batchfinder.results.probe import Probe

NOT_CLEAN_WARNING = (
    "an earlier probe left memory in use, or holes in it, so the answer may be too small; "
    "use batchfinder find for a fresh process per probe"
)


class Supervisor(AtPlace):
    """Tries sizes with a worker; see :class:`~batchfinder.search.prober.Prober`.

    A worker that is not back at its baseline, has broken its device, or died is started again.
    Where a probe leaves traces each confirmation gets a fresh one.

    Args:
        worker: tries the sizes; ends with the supervisor.
        options: of the search.
        estimate: the estimate to make beside the steps; None: none.

    Attributes:
        seconds_by_part: where the time went, beside the steps.
        seconds_before: the time that the first start took.
        recordings: what confirmations asked the allocator for, by size.

    Raises:
        BatchFinderError, UserCodeError: as the start of the worker.
    """

    def __init__(
        self, worker: Worker, options: ProbeOptions, estimate: EstimateOrder | None = None
    ) -> None:
        self.worker, self.options = worker, options
        self.notes = Notes()
        self.seconds_by_part = {"loading": 0.0, "estimate": 0.0, "restoring": 0.0}
        self.recordings: dict[int, Recording] = {}
        self._estimate_order = estimate
        self._is_fit = self._is_used = False
        try:
            self.place = self._start()
        except BaseException:
            self.close()
            raise
        self.seconds_before = self.seconds_by_part["loading"]

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.notes.texts

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        try:
            return self._probe(batch_size, confirm)
        except UserCodeError as error:
            if batch_size > 1:
                raise
            problem = error
        # Not above, where each error that follows would be chained to that one.
        self._blame_the_size(problem)
        raise problem

    def estimate(self) -> tuple[int | None, list[str]]:
        """The estimate that was ordered.

        Returns:
            The size, None if there is none in time, and texts for the user.
        """
        if not isinstance(self.worker, ProcessWorker):
            return None, []
        started = time.monotonic()
        found = self.worker.estimate()
        self.seconds_by_part["estimate"] += time.monotonic() - started
        self._is_fit &= self.worker.is_running
        return found

    def fingerprint(self) -> dict[str, Any] | None:
        """What the answer depends on; None if the worker cannot tell."""
        if not isinstance(self.worker, ProcessWorker):
            return None
        try:
            return self.worker.fingerprint()
        except WorkerError:
            self._is_fit = False
            return None

    def close(self) -> None:
        self.worker.end()

    def _probe(self, batch_size: int, confirm: bool) -> Probe:
        attempt = self._attempt(batch_size, confirm)
        # A worker's death, and an OOM in a process that had not got rid of an earlier probe, may
        # have nothing to do with the size: only a second one in a fresh worker is a verdict.
        if self._is_doubtful(attempt) and self.worker.is_replaceable:
            self._is_fit = False
            attempt = self._attempt(batch_size, confirm)
        elif attempt.is_doubtful:
            self.notes.add(NOT_CLEAN_WARNING)
        return attempt.probe

    def _is_doubtful(self, attempt: Attempt) -> bool:
        return attempt.is_doubtful

    def _attempt(self, batch_size: int, confirm: bool) -> Attempt:
        if self.worker.is_replaceable and (
            not self._is_fit or (confirm and self._is_used and not self.place.is_repeatable)
        ):
            self._start()
        self._is_fit = False  # where an error is raised
        attempt = self.worker.attempt(batch_size, confirm)
        self._take_note(attempt)
        return attempt

    def _take_note(self, attempt: Attempt) -> None:
        """Draw the consequences of an attempt, for this worker and for later ones."""
        self._is_fit = attempt.is_reusable
        self._is_used = True
        self.notes.add(*attempt.warnings)
        self.seconds_by_part["restoring"] += attempt.restoring_seconds
        if attempt.recording is not None and attempt.probe.fits:
            self.recordings[attempt.probe.batch_size] = attempt.recording
        if attempt.probe.fits and self.options.warm_up_batch_size is None:
            self.options = replace(self.options, warm_up_batch_size=attempt.probe.batch_size)

    def _start(self) -> Place:
        started = time.monotonic()
        place = self.worker.start(Order(self.options, estimate=self._estimate_order))
        self._take_note_of_start(place)
        self.seconds_by_part["loading"] += time.monotonic() - started
        return place

    def _take_note_of_start(self, place: Place) -> None:
        if isinstance(self.worker, ProcessWorker):
            self.notes.add(*self.worker.warnings.texts)
        self.notes.add(*([place.limit_warning] if place.limit_warning else []))
        # Later workers get the same budget, whatever other processes have taken meanwhile.
        self.options = replace(self.options, budget_bytes=place.budget_bytes)
        self._is_fit = True
        self._is_used = False

    def _blame_the_size(self, problem: UserCodeError) -> None:
        """Raise of a batch of one if one of two runs: code that squeezes it fails on the rest."""
        try:
            self._probe(2, confirm=False)
        except UserCodeError:
            return
        fails = f"a batch of 1 fails ({problem}), one of 2 does not"
        self.notes.add(f"{fails}: only sizes from 2 on were tried")
        raise BatchTooSmallError(f"{fails}; try sizes from 2 on")
