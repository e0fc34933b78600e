"""The time that a script takes to start, in steps at the expected size."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from batchfinder.launching.record import Record
from batchfinder.results.memory_model import Phase, fit
from batchfinder.results.probe import Probe
from batchfinder.search.plan import Prices

# The shortest step, in seconds: a clock that is read once per step is no finer.
LEAST_SECONDS = 1e-3

# Two steps show a slope if one of them has at least this many times the examples of the other. The
# seconds of single steps differ by more than the seconds that an example or two add.
APART = 8


class StartTime:
    """Set the price of a launch, the time that it takes to start, by earlier launches."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._starts: list[float] = []
        self._steps: dict[int, float] = {}
        self._peaks: dict[int, Mapping[Phase, int]] = {}

    def note(self, probe: Probe, record: Record, budget_bytes: int) -> None:
        """Learn from a launch that fits: its start time, its step time, the size it predicts."""
        if not probe.fits or record.start_seconds is None or probe.step_seconds is None:
            return
        self._starts.append(record.start_seconds)
        self._steps[probe.batch_size] = probe.step_seconds
        self._peaks[probe.batch_size] = probe.phase_peak_bytes
        model = fit(self._peaks.items())
        size = (model and model.max_batch_size(budget_bytes)) or probe.batch_size
        step = max(LEAST_SECONDS, seconds_at(size, self._steps))
        self._prices.launch = median(self._starts) / step


def seconds_at(size: int, steps: Mapping[int, float]) -> float:
    """Predict the seconds of a step from the line through the smallest and largest known sizes.

    Example:
        >>> seconds_at(100, {1: 0.5, 11: 1.0})
        5.45
    """
    (least, first), (most, last) = min(steps.items()), max(steps.items())
    if most < APART * least:
        return last
    slope = max(0.0, (last - first) / (most - least))
    return last + slope * (size - most)
