from __future__ import annotations

import pytest

from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome, Probe
from batchfinder.search.bounds import Bounds
from batchfinder.search.bracket import Bracket


def test_the_bend_between_a_validation_and_the_training_is_no_noise() -> None:
    known = Bracket(Bounds.of(1, 1000), 1000, is_repeatable=False)
    for size in (1, 10, 60, 80):
        peaks = {Phase.VALIDATION: 600, Phase.FORWARD_BACKWARD: 100 + 10 * size}
        known.record(Probe(size, Outcome.FITS, 1, 0.0, phase_peak_bytes=peaks), False)
    assert known.spread == pytest.approx(0)


@pytest.mark.parametrize(("differs", "resolution"), [(False, 1), (True, 20)])
def test_the_bracket_of_steps_that_differ_ends_where_their_order_decides(
    differs: bool, resolution: int
) -> None:
    known = Bracket(Bounds.of(1, 1000), 1000)
    known.record(Probe(600, Outcome.FITS, 10, 0.0, steps_differ=differs), True)
    known.record(Probe(800, Outcome.OOM, 1, 0.0), True)
    assert known.resolution == resolution
