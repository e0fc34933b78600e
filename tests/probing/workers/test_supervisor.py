"""When the supervisor starts a worker anew."""

from __future__ import annotations

from typing import cast

import pytest

from batchfinder.probing.attempt import Attempt
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.place import Place
from batchfinder.probing.workers.supervisor import Supervisor
from batchfinder.probing.workers.worker import Order, Worker
from batchfinder.results.probe import Outcome, Probe


class PaperWorker:
    """Runs nothing, and counts how often it was started."""

    is_replaceable = is_running = True

    def __init__(self, *, is_repeatable: bool, confirms_afresh: bool) -> None:
        self.warnings = ()
        self.starts, self.fits = 0, 100
        self._place = Place(
            "paper", 1000, 0, 900, is_repeatable, {}, confirms_afresh=confirms_afresh
        )

    def start(self, order: Order) -> Place:
        self.starts += 1
        return self._place

    def attempt(self, batch_size: int, confirm: bool) -> Attempt:
        outcome = Outcome.FITS if batch_size <= self.fits else Outcome.OOM
        probe = Probe(batch_size, outcome, steps=1, seconds=0.0, confirmed=confirm)
        return Attempt(probe, is_believed=True, is_reusable=True)

    def end(self) -> None: ...


@pytest.mark.parametrize(
    ("is_repeatable", "confirms_afresh", "starts"),
    [(True, False, 1), (True, True, 3), (False, False, 3)],
)
def test_a_confirmation_gets_a_new_process_where_the_old_one_would_mislead(
    is_repeatable: bool, confirms_afresh: bool, starts: int
) -> None:
    worker = PaperWorker(is_repeatable=is_repeatable, confirms_afresh=confirms_afresh)
    supervisor = Supervisor(cast(Worker, worker), ProbeOptions())

    for size, confirm in ((1, False), (8, False), (8, True), (9, True)):
        assert supervisor.probe(size, confirm=confirm).fits

    assert worker.starts == starts


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_without_a_new_process_varying_batches_get_a_warning(is_repeatable: bool) -> None:
    worker = PaperWorker(is_repeatable=is_repeatable, confirms_afresh=True)
    worker.is_replaceable = False

    warnings = Supervisor(cast(Worker, worker), ProbeOptions()).warnings

    assert any("vary in length" in text for text in warnings) == is_repeatable


def test_where_batches_vary_a_failure_above_a_proved_size_needs_no_new_process() -> None:
    worker = PaperWorker(is_repeatable=True, confirms_afresh=True)
    supervisor = Supervisor(cast(Worker, worker), ProbeOptions())
    worker.fits = 8

    supervisor.probe(1)
    assert supervisor.probe(8, confirm=True).fits
    assert not supervisor.probe(9, confirm=True).fits
    assert worker.starts == 2

    worker.fits = 9  # a used process favors a size, so a new one decides
    assert supervisor.probe(9, confirm=True).fits
    assert worker.starts == 3
