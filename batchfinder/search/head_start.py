"""Choose the estimate that a search starts from, if any. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from batchfinder.results.probe import FORESEEN_NOTE, SHORT_LIVED_NOTE, Outcome, Probe
from batchfinder.search.bounds import Bounds
from batchfinder.search.prober import Prober

T = TypeVar("T")

MakeEstimate: TypeAlias = Callable[[str, int, Bounds], tuple[int | None, list[str]]]
"""``estimate(device, budget_bytes, bounds)`` returns the expected size, None if it is unknown, and
notes for the user."""


class Guess(NamedTuple):
    """A guess of the answer that does not come from the readings so far.

    Attributes:
        size: the batch size.
        is_sure: False if a recording of a larger size would show better where memory runs out.
        deviation: how near the answer is, as a share above 0; by default as in
            scripts/benchmarks/bench_counted_search.py.
    """

    size: int
    is_sure: bool = True
    deviation: float = 0.005


# An answer under another setting is named if the lower end of its guess is this many of its
# deviations above the answer. What was named was within 1 % of a search under the setting where
# batches are alike, and 4 % below to 2 % above where they vary in length
# (scripts/results/setups.json, "expandable"). Where less was promised, it was up to 11 % too high.
DEVIATIONS = 3


def worth_naming(answer: int, deviation: float = Guess(1).deviation) -> int:
    """Return the least guess under another setting that is clearly more than an answer."""
    return math.ceil(answer * (1 + DEVIATIONS * deviation) / (1 - deviation))


MakeGuess: TypeAlias = Callable[["Probe | None"], "Guess | None"]
"""``guess(failure)`` returns a guess by all that is known when it is called, or None. The smallest
size that failed is given, if any has."""


@dataclass
class HeadStart:
    """The estimate that a search starts from.

    A simulated estimate is made only if the user asks for it. There is none for the CPU, whose heap
    and libraries use about ten percent on top of the tensors, more for some models than for others.
    It is the guess until a replay has one, which knows this device's kernels: without replays, an
    estimate above the answer costs more probes than it saves.

    Attributes:
        estimate: makes the simulated estimate; None if the user did not ask for it.
        replay: replays the memory requests of two small confirmations to guess the largest size
            that fits. None if nothing is recorded.
        lasts: replays the confirmation at a size for more steps; returns False if they run out of
            memory.
        foresee: replays the confirmation just below a size, scaled to it, where such a replay will
            decide in any case; returns True if it runs out of memory.
        expand: guesses the largest size under expandable segments, from the answer without them;
            returns None if it is unknown or not clearly larger.
        batch_size: the simulated estimate; None before it is made, or if there is none.
        notes: notes for the user.
        seconds: the time that guesses took, or waiting for them.
    """

    estimate: MakeEstimate | None = None
    replay: MakeGuess | None = None
    lasts: Callable[[int], bool] = lambda _: True
    foresee: Callable[[int], bool] = lambda _: False
    expand: Callable[[int], Guess | None] = lambda _: None
    batch_size: int | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    _is_estimated: bool = False

    def __post_init__(self) -> None:
        for name in ("estimate", "replay", "lasts", "foresee", "expand"):
            if (function := getattr(self, name)) is not None:
                setattr(self, name, partial(self._timed, function))

    @property
    def replays(self) -> bool:
        """True if two small sizes have to be confirmed before the guess."""
        return self.replay is not None

    def of(self, prober: Prober, bounds: Bounds) -> MakeGuess | None:
        """Return the function that guesses the answer of a search; None if there is none.

        Args:
            prober: the prober of the search.
            bounds: the sizes that it may try.
        """
        return partial(self._guess, prober, bounds) if self.estimate or self.replay else None

    def foreseen(self, batch_size: int) -> Probe | None:
        """Return the failure of a confirmation that need not run; None if it has to."""
        if not self.foresee(batch_size):
            return None
        return Probe(batch_size, Outcome.OOM, steps=0, seconds=0.0, note=FORESEEN_NOTE)

    def judged(self, probe: Probe) -> Probe:
        """Return a probe; as out of memory if it is a confirmation whose requests do not last."""
        if not (probe.confirmed and probe.fits) or self.lasts(probe.batch_size):
            return probe
        return replace(probe, outcome=Outcome.OOM, note=SHORT_LIVED_NOTE)

    def _timed(self, function: Callable[..., T], *arguments: Any) -> T:
        started = time.monotonic()
        made = function(*arguments)
        self.seconds += time.monotonic() - started
        return made

    def _guess(self, prober: Prober, bounds: Bounds, failure: Probe | None) -> Guess | None:
        found = self.replay(failure) if self.replay else None
        if found or self.estimate is None:
            return found
        if prober.device.partition(" ")[0] == "cpu":
            self.notes = ["the search started without an estimate: there is none for the CPU"]
            return None
        if not self._is_estimated:
            self._is_estimated = True
            estimated = self.estimate(prober.device, prober.budget_bytes, bounds)
            self.batch_size, self.notes = estimated
        size, end = self.batch_size, failure.batch_size if failure else math.inf
        return Guess(size) if size and size < end else None
