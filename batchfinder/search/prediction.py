"""Where the memory of a training step is going to run out, by what was read so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from batchfinder.results.memory_model import Phase
from batchfinder.results.result import Probe


def predict_maximum(
    start: Probe,
    readings: Mapping[int, Probe],
    budget_bytes: float,
    apart: float,
    noise_bytes: float = 0,
) -> float:
    """The batch size at which the line of some phase meets the budget.

    Args:
        start: where the lines start: the largest size that fits.
        readings: at least one probe that fits, by batch size: where their slopes come from.
        budget_bytes: what a step may use.
        apart: a slope is taken between the largest reading and one at most this share of it:
            between two sizes close to each other it would show little but noise.
        noise_bytes: added to what was seen to rise, as caution.

    Returns:
        The size, not rounded; inf if nothing was seen to rise.

    Example:
        >>> from batchfinder.results.memory_model import Phase
        >>> from batchfinder.results.result import Outcome
        >>> def probe(batch_size, peak):
        ...     peaks = {Phase.FORWARD_BACKWARD: peak}
        ...     return Probe(batch_size, Outcome.FITS, 1, seconds=0.0, phase_peak_bytes=peaks)
        >>> readings = {1: probe(1, 110), 5: probe(5, 150)}
        >>> predict_maximum(readings[5], readings, budget_bytes=1000, apart=0.9)
        90.0
    """
    upper = max(readings)
    lower = max((size for size in readings if size <= apart * upper), default=min(readings))
    peaks, lower_peaks = readings[upper].phase_peak_bytes, readings[lower].phase_peak_bytes
    maximum = math.inf
    for phase in start.phase_peak_bytes.keys() & peaks.keys() & lower_peaks.keys():
        rise = peaks[phase] - lower_peaks[phase]
        if rise > 0:
            room = max(0, budget_bytes - start.phase_peak_bytes[phase])
            reach = room / (rise + noise_bytes) * (upper - lower)
            maximum = min(maximum, start.batch_size + reach)
    return maximum


def predict_easy_maximum(
    start: Probe, readings: Mapping[int, Probe], budget_bytes: float, apart: float
) -> float:
    """The batch size up to which a fragmented allocator serves the step without any trouble.

    That is where the line of what it holds, instead of what its tensors take, meets the budget.

    Args:
        start: as in :func:`predict_maximum`.
        readings: as there.
        budget_bytes: as there.
        apart: as there.

    Returns:
        The size, not rounded; inf if nothing was seen to rise, or what is held was not read.
    """

    def held(probe: Probe) -> Probe:
        peak = probe.peak_reserved_bytes
        return replace(probe, phase_peak_bytes={Phase.FORWARD_BACKWARD: peak} if peak else {})

    held_readings = {size: held(probe) for size, probe in readings.items()}
    return predict_maximum(held(start), held_readings, budget_bytes, apart)
