"""Time sizes below a known answer, to find the knee of the throughput."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from batchfinder.results.probe import Probe
from batchfinder.results.throughput import Throughput, throughput_of
from batchfinder.search.bounds import ALL_SIZES, Bounds

# Sizes go down by the factor DOWN until the rate is below the share SLOWER of the best rate.
DOWN = 2
SLOWER = 0.85
MOST_SIZES = 8

# One more size is timed between two neighbors if their ratio is above this.
APART = 1.6

# Each size is timed in at most this many rounds: 3 % noise is then an error of 1.5 %.
MOST_ROUNDS = 6

Round = dict[int, Sequence[float]]


def measure_throughput(
    time_steps: Callable[[int], Probe],
    probes: Sequence[Probe],
    answer: int,
    bounds: Bounds = ALL_SIZES,
    seconds_left: Callable[[], float] = lambda: math.inf,
) -> Throughput | None:
    """Time training steps at sizes below the answer of a search, and find the knee.

    Readings of the search are used again. The new ones cost at most as much as the search did. The
    load of a machine changes meanwhile, so all sizes are timed in rounds, up and down.

    Args:
        time_steps: runs steps at one size. Every size up to the answer should fit.
        probes: the probes of the search.
        answer: the batch size that it found.
        bounds: the sizes that may be timed.
        seconds_left: returns the seconds until the time limit.

    Returns:
        The rates and the knee; None if no step at the answer was timed.

    Raises:
        Exception: whatever ``time_steps`` raises.
    """
    first: Round = {}
    for probe in probes:
        if probe.fits and probe.confirmed and probe.batch_size <= answer:
            _note(probe, first)
    if answer not in first:
        return None
    left = sum(probe.samples or probe.batch_size * probe.steps for probe in probes)
    longest = max(probe.seconds for probe in probes if probe.fits)
    rounds, steps = [first], 1

    def takes(size: int) -> bool:
        """Time a size, if that is not too expensive; return True if it worked."""
        nonlocal left, steps
        if size * steps > left or longest > seconds_left():
            return False
        probe = time_steps(size)
        steps = probe.steps
        left -= probe.samples or size * probe.steps
        return probe.fits and _note(probe, rounds[-1])

    while len(first) < MOST_SIZES and (size := _next_size(first, bounds)) is not None:
        if not takes(size):
            break
    again = [size for size in sorted(first) if sum(n for n in first if n <= size) * steps <= left]
    while len(rounds) < MOST_ROUNDS and again and sum(again) * steps <= left:
        rounds.append({})
        if not all(takes(size) for size in again):
            break
        again.reverse()
    return throughput_of([one for one in rounds if one])


def _note(probe: Probe, seconds: Round) -> bool:
    """Keep a probe's readings; return True if there are any."""
    if readings := probe.batch_seconds:
        seconds[probe.batch_size] = [*seconds.get(probe.batch_size, ()), *readings]
    return bool(readings)


def _next_size(seconds: Round, bounds: Bounds) -> int | None:
    """Return the next size to time; None if enough are known."""
    known = throughput_of([seconds])
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
