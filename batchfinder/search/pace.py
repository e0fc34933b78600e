"""How boldly a search goes about it, by what a verdict of the device is worth."""

from __future__ import annotations

from dataclasses import dataclass

# What fits beyond the predicted maximum, or fails below it, is passed by this share of the size:
# fragmentation takes a few percent. Twice as far each further time.
STRIDE = 1 / 32

# After so many probes in a row that did not halve the bracket, it is bisected.
PATIENCE = 3


@dataclass(frozen=True)
class Pace:
    """How a search goes about it, by what a verdict is worth.

    Attributes:
        approach: while nothing has failed, go this far towards the predicted maximum,
        close_enough: and once a reading lies beyond this share of it, to the size that should fail.
        apart: a slope is taken between the largest reading and one at most this share of it:
            between two sizes close to each other it would show little but noise.
        reading_noise: readings are trusted to this share of the budget: a slope that two small
            sizes show less clearly than that is not extended all the way.
        resolution: the bracket is drawn no closer than this share of the size.
    """

    approach: float
    close_enough: float
    apart: float
    reading_noise: float
    resolution: float


REPEATABLE = Pace(approach=0.75, close_enough=0.5, apart=0.9, reading_noise=1 / 1000, resolution=0)

# The same size needs some percent more or less from run to run: a nearer reading tells hardly more.
UNREPEATABLE = Pace(
    approach=0.6, close_enough=0.25, apart=0.7, reading_noise=1 / 100, resolution=1 / 20
)
