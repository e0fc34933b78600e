"""Whether the peaks of a few training steps say that many more will run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

# Where peaks differ from step to step, so many standard deviations above their mean must fit into
# the budget; the headroom beyond it takes the rest.
DEVIATIONS = 3

# A peak below this share of the highest was read too low: memory that was asked for and not written
# to is seen only where a step sets a new mark.
READ_TOO_LOW = 0.85


def steps_without_growth(peaks: Sequence[int], noise_bytes: float) -> int:
    """How many of the last steps needed no more than the most that was needed before.

    Args:
        peaks: the peak of each step, in bytes.
        noise_bytes: a mark is passed only by more than this.

    Returns:
        The number of steps; the first one always grows.

    Example:
        >>> steps_without_growth([90, 100, 95, 99], noise_bytes=0)
        2
    """
    highest = steady = 0
    for peak in peaks:
        steady = steady + 1 if highest and peak <= highest + noise_bytes else 0
        highest = max(highest, peak)
    return steady


def highest_to_expect(peaks: Sequence[int]) -> float:
    """What a step must be expected to need sooner or later, by the few that ran.

    The first step is left out, since memory that it frees lies in the way of later ones; so are
    peaks that were read too low.

    Args:
        peaks: the peak of each step, in bytes; at least one.

    Returns:
        The bytes, at least the most that was needed.

    Example:
        >>> highest_to_expect([80, 98, 60, 100, 102])
        106.0
    """
    later = [peak for peak in peaks[1:] if peak >= READ_TOO_LOW * max(peaks)]
    if len(later) < 2:
        return max(peaks)
    return max(*peaks, fmean(later) + DEVIATIONS * stdev(later))
