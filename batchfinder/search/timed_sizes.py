"""Time sizes below a known answer, to find the knee of the throughput."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from batchfinder.results.probe import Probe
from batchfinder.results.throughput import Throughput, throughput_of
from batchfinder.search.bounds import ALL_SIZES, Bounds
from batchfinder.search.search import RunProbe

# Sizes go down by the factor DOWN until the rate is below the share SLOWER of the best rate.
DOWN = 2
SLOWER = 0.85
MOST_SIZES = 6

# One more size is timed between two neighbors if their ratio is above this.
APART = 1.6


def measure_throughput(
    run: RunProbe,
    probes: Sequence[Probe],
    answer: int,
    bounds: Bounds = ALL_SIZES,
) -> Throughput | None:
    """Time training steps at sizes below the answer of a search, and find the knee.

    Readings of the search are used again. The new ones cost at most as much as the search did. The
    first new size is timed once more at the end, because the load of a machine may drift meanwhile.

    Args:
        run: runs one size. Every size below the answer should fit.
        probes: the probes of the search.
        answer: the batch size that it found.
        bounds: the sizes that may be timed.

    Returns:
        The rates and the knee; None if no step at the answer was timed.

    Raises:
        Exception: whatever ``run`` raises.
    """
    seconds: dict[int, list[float]] = {}
    for probe in probes:
        _note(probe, seconds)
    seconds = {size: readings for size, readings in seconds.items() if size <= answer}
    if answer not in seconds:
        return None
    left = sum(probe.samples or probe.batch_size * probe.steps for probe in probes)
    steps = len(seconds[answer]) + 1
    first = 0
    while len(seconds) < MOST_SIZES:
        size = _next_size(seconds, bounds)
        if size is None or (size + (first or size)) * steps > left:
            break
        probe = run(size, True)
        left -= probe.samples or size * probe.steps
        if not _note(probe, seconds):
            break
        first = first or size
    again: dict[int, list[float]] = {}
    if not first or not _note(run(first, True), again):
        return throughput_of(seconds)
    before, after = (statistics.median(readings[first]) for readings in (seconds, again))
    return throughput_of(seconds, abs(after / before - 1))


def _note(probe: Probe, seconds: dict[int, list[float]]) -> bool:
    """Keep a probe's readings except the first, which chooses kernels and allocates memory."""
    batches = max(1, round((probe.samples or 1) / (probe.steps * probe.batch_size)))  # in a step
    readings = [second / batches for second in probe.steps_seconds[1:]]
    is_of_use = probe.fits and probe.confirmed and bool(readings)
    if is_of_use:
        seconds[probe.batch_size] = seconds.get(probe.batch_size, []) + readings
    return is_of_use


def _next_size(seconds: dict[int, list[float]], bounds: Bounds) -> int | None:
    """Return the next size to time; None if enough are known."""
    known = throughput_of(seconds)
    rates = [rate.samples_per_second for rate in known.rates]
    sizes = [rate.batch_size for rate in known.rates]
    if rates[0] > SLOWER * max(rates) and sizes[0] > bounds.first:
        return max(bounds.first, bounds.at_most(sizes[0] / DOWN))
    at = sizes.index(known.knee)
    around = [(sizes[i], sizes[i + 1]) for i in (at - 1, at) if 0 <= i < len(sizes) - 1]
    for low, high in around:
        middle = bounds.at_most(math.isqrt(low * high))
        if high > APART * low and low < middle < high:
            return middle
    return None
