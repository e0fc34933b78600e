"""Supervise any worker: reuse it while it is clean, restart it if not, repeat doubtful failures.

A step that hangs ends its worker in ``process_worker``, by the times in ``hung``. Imports no torch.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from batchfinder.errors import WorkerError, is_of_the_user, reason_of
from batchfinder.probing.attempt import Attempt
from batchfinder.probing.notes import Notes
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.place import AtPlace, Place
from batchfinder.probing.too_small import sizes_that_run
from batchfinder.probing.workers.worker import EstimateOrder, Order, Worker
from batchfinder.results.probe import Probe

NOT_CLEAN_WARNING = (
    "an earlier probe left memory in use, or holes in it, so the answer may be too small. "
    "Try batchfinder find, which has a fresh process for each probe"
)


class Supervisor(AtPlace):
    """Tries sizes with a worker; see :class:`~batchfinder.search.prober.Prober`.

    A worker is restarted if its memory is not back at its baseline, its device broke, or it died.
    On devices where probes leave traces, each confirmation gets a fresh worker.

    Args:
        worker: tries the sizes. The supervisor ends it when it closes.
        options: the options of the search.
        estimate: the estimate to make during the steps; None for no estimate.

    Attributes:
        seconds_by_part: time spent on loading and restoring, in seconds.

    Raises:
        BatchFinderError, UserCodeError: the worker could not start.
    """

    def __init__(
        self, worker: Worker, options: ProbeOptions, estimate: EstimateOrder | None = None
    ) -> None:
        self.worker, self.options = worker, options
        self.notes = Notes()
        self.seconds_by_part = {"loading": 0.0, "restoring": 0.0}
        self._estimate_order = estimate
        self._is_fit = self._is_used = False
        try:
            self.settle(self._start())
        except BaseException:
            self.close()
            raise
        if self.place.device.startswith("cuda"):
            self.recordings = {}

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        try:
            return self._probe(batch_size, confirm)
        except Exception as error:
            if not is_of_the_user(error) or self.options.warm_up_batch_size is not None:
                raise  # once a size has run, no other has to show what the code takes
            problem = error
        # Called outside the except block, so that later errors are not chained to this one.
        found = sizes_that_run(
            batch_size, reason_of(problem), self.place.sample_size, self._runs_without_an_error
        )
        if found is None:
            raise problem
        self.notes.add(found.note)
        raise found.error()

    def estimate(self) -> tuple[int | None, list[str]]:
        """Return the estimate that was ordered, or None without one in time; and texts."""
        found = self.worker.estimate()
        self._is_fit &= self.worker.is_running
        return found

    def fingerprint(self) -> dict[str, Any] | None:
        """Return what the answer depends on; None if the worker cannot read it."""
        try:
            return self.worker.fingerprint()
        except WorkerError:
            self._is_fit = False
            return None

    def close(self) -> None:
        self.worker.end()

    def _probe(self, batch_size: int, confirm: bool) -> Probe:
        attempt = self._attempt(batch_size, confirm)
        # A worker may die for reasons other than the size. It may also run out of memory because an
        # earlier probe left memory in use. So only a second failure, in a fresh worker, counts.
        if self._is_doubtful(attempt) and self.worker.is_replaceable:
            self._is_fit = False
            attempt = self._attempt(batch_size, confirm)
        elif attempt.is_doubtful:
            self.notes.add(NOT_CLEAN_WARNING)
        return attempt.probe

    def _runs_without_an_error(self, batch_size: int) -> bool:
        try:
            self._probe(batch_size, confirm=False)
        except Exception:  # noqa: BLE001 - the first error is raised
            return False
        return True

    def _is_doubtful(self, attempt: Attempt) -> bool:
        return attempt.is_doubtful

    def _attempt(self, batch_size: int, confirm: bool) -> Attempt:
        needs_new = confirm and self._is_used and not self.place.is_repeatable
        if self.worker.is_replaceable and (needs_new or not self._is_fit):
            self._start()
        self._is_fit = False  # in case an error is raised
        attempt = self.worker.attempt(batch_size, confirm)
        self._take_note(attempt)
        return attempt

    def _take_note(self, attempt: Attempt) -> None:
        """Update the state after an attempt, for this worker and for later ones."""
        self._is_fit = attempt.is_reusable
        self._is_used = True
        self.notes.add(*attempt.warnings)
        self.seconds_by_part["restoring"] += attempt.restoring_seconds
        if attempt.budget_bytes is not None:
            self.lower_budget(attempt.budget_bytes)
            self.options = replace(self.options, budget_bytes=attempt.budget_bytes)
        if attempt.recording is not None and self.recordings is not None:
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
        self.notes.add(*self.worker.notes.texts, place.limit_warning)
        # Later workers get the same budget, even if other processes use more memory by then.
        self.options = replace(self.options, budget_bytes=place.budget_bytes)
        self._is_fit = True
        self._is_used = False
