"""When the supervisor starts a worker anew."""

from __future__ import annotations

from typing import cast

import pytest

from batchfinder.probing.attempt import Attempt
from batchfinder.probing.notes import Notes
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.place import Place
from batchfinder.probing.workers.supervisor import Supervisor
from batchfinder.probing.workers.worker import Order, Worker
from batchfinder.results.probe import Outcome, Probe


class PaperWorker:
    """Runs nothing, and counts how often it was started."""

    is_replaceable = is_running = True

    def __init__(self, *, is_repeatable: bool) -> None:
        self.notes = Notes()
        self.starts = 0
        self._place = Place("paper", 1000, 0, 900, is_repeatable, {})

    def start(self, order: Order) -> Place:
        self.starts += 1
        return self._place

    def attempt(self, batch_size: int, confirm: bool) -> Attempt:
        probe = Probe(batch_size, Outcome.FITS, steps=1, seconds=0.0, confirmed=confirm)
        return Attempt(probe, is_believed=True, is_reusable=True)

    def end(self) -> None: ...


@pytest.mark.parametrize(("is_repeatable", "starts"), [(True, 1), (False, 3)])
def test_a_confirmation_gets_a_new_process_where_the_old_one_would_mislead(
    is_repeatable: bool, starts: int
) -> None:
    worker = PaperWorker(is_repeatable=is_repeatable)
    supervisor = Supervisor(cast(Worker, worker), ProbeOptions())

    for size, confirm in ((1, False), (8, False), (8, True), (9, True)):
        assert supervisor.probe(size, confirm=confirm).fits

    assert worker.starts == starts
