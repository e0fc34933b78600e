"""The plan's candidates."""

from __future__ import annotations

import pytest

from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome, Probe
from batchfinder.search.belief import believe
from batchfinder.search.bounds import Bounds
from batchfinder.search.bracket import Bracket
from batchfinder.search.plan import candidates


@pytest.mark.parametrize("high", [600, 631, 660, 700])
def test_some_size_ends_a_search_if_it_fails_and_some_if_it_fits(high: int) -> None:
    """Of 569 and 631, none did if it failed: after 600, a confirmation of 570 was wasted."""
    known = Bracket(Bounds.of(1, 10_000), 1000, is_repeatable=False)
    for size, peak in ((1, 150), (12, 180), (250, 600), (400, 770), (569, 970)):
        peaks = {Phase.FORWARD_BACKWARD: peak}
        known.record(Probe(size, Outcome.FITS, 6, 0.0, phase_peak_bytes=peaks), True)
    known.record(Probe(high, Outcome.OOM, 1, 0.0), True)

    between = candidates(believe(known), known, high)[1:-1]

    assert any(size - known.low <= known.resolution_at(size) for size in between)
    assert any(high - size <= known.resolution for size in between)
