"""Searches with a time limit, on a clock on paper."""

from __future__ import annotations

import pytest
from fakes import FakeProber

from batchfinder.errors import UsageError
from batchfinder.results.probe import Probe
from batchfinder.results.result import Status
from batchfinder.search.deadline import deadline_in
from batchfinder.search.run import run_search


class SlowProber(FakeProber):
    """Steps take a millisecond an example, on the clock that the deadline reads."""

    now = 0.0

    def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
        self.step_seconds = 0.001 * batch_size
        probe = super().probe(batch_size, confirm=confirm)
        self.now += probe.seconds
        return probe


@pytest.mark.parametrize("seconds", [0.2, 1, 3, 10, 100])
def test_a_search_ends_in_time_with_a_confirmed_size(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prober = SlowProber(budget_bytes=20_000)
    monkeypatch.setattr("batchfinder.search.deadline.time.monotonic", lambda: prober.now)
    result = run_search(prober, deadline=deadline_in(seconds))
    assert prober.now <= seconds
    assert result.confirmed_steps > 0
    assert result.batch_size in prober.confirmed
    assert result.is_final == (result.status is not Status.TIME_LIMIT)
    assert result.is_final or result.batch_size < 1990
    assert result.is_final or seconds < 100


def test_a_size_is_confirmed_before_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(SlowProber):
        def probe(self, batch_size: int, *, confirm: bool = False) -> Probe:
            if batch_size > 20:
                raise KeyboardInterrupt
            return super().probe(batch_size, confirm=confirm)

    prober = Hangs(budget_bytes=20_000)
    monkeypatch.setattr("batchfinder.search.deadline.time.monotonic", lambda: prober.now)
    with pytest.raises(KeyboardInterrupt):
        run_search(prober, deadline=deadline_in(10))
    assert prober.confirmed


@pytest.mark.parametrize("seconds", [0, -1, 1e10, float("inf"), float("nan")])
def test_a_limit_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="above 0 seconds"):
        deadline_in(seconds)
