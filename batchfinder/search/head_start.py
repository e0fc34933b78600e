"""Whether a search starts from an estimate, and from which. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeAlias

from batchfinder.results.probe import Probe
from batchfinder.search.bounds import Bounds
from batchfinder.search.prober import Prober
from batchfinder.search.search import MakeGuess

# Most estimates take 1 to 5 seconds; where they need a process of their own, twice as many. On
# PyTorch's allocator one saves 6 full-size steps of 14 in the mean where it knows the kernels, and
# the answer is larger by 1 % in the mean, and up to 7 % (scripts/bench_counted_search.py).
SLOW_STEP_SECONDS = 1.0

MakeEstimate: TypeAlias = Callable[[str, int, Bounds], tuple[int | None, list[str]]]
"""From a device's name and budget to the size expected, None if that cannot be told; and what the
user should know."""


class HeadStart:
    """The estimate that a search starts from, made when two small sizes have run.

    Without being asked for it is made where it pays: on an accelerator whose steps will be slow.
    Failures of such an estimate are silent. There is none for the CPU: its heap and its
    libraries take some ten percent beside the tensors, more for some models than for others, and an
    estimate above the answer costs more probes than it saves.

    Args:
        estimate: makes it.
        is_asked_for: make it in any case, because the user wants it.
        may_pay: otherwise make it if steps are slow. False for ranks, which must all try the same
            sizes although their clocks differ, and for compiled steps, which use less memory than
            is simulated.

    Attributes:
        batch_size: the estimate; None while there is none.
        notes: what the user should know.
    """

    def __init__(self, estimate: MakeEstimate, *, is_asked_for: bool, may_pay: bool) -> None:
        self._estimate = estimate
        self._is_asked_for = is_asked_for
        self._may_pay = may_pay
        self.batch_size: int | None = None
        self.notes: list[str] = []

    def of(self, prober: Prober, bounds: Bounds) -> MakeGuess:
        """What a search asks where the answer may be.

        Args:
            prober: that runs the search.
            bounds: its smallest size, the largest or None, and what each is a multiple of.
        """

        def guess(probes: Mapping[int, Probe], predicted: float) -> int | None:
            if self._is_asked_for:
                self.batch_size, self.notes = self._made(prober, bounds)
            elif self._pays(probes, predicted):
                with suppress(Exception):  # the user's code runs in it, and the search goes on
                    self.batch_size, _ = self._made(prober, bounds)
            return self.batch_size

        return guess

    def _made(self, prober: Prober, bounds: Bounds) -> tuple[int | None, list[str]]:
        if prober.device.partition(" ")[0] == "cpu":
            return None, ["the search started without an estimate: there is none for the CPU"]
        return self._estimate(prober.device, prober.budget_bytes, bounds)

    def _pays(self, probes: Mapping[int, Probe], predicted: float) -> bool:
        if not self._may_pay:
            return False
        sizes = min(probes), max(probes)
        seconds = [probes[size].step_seconds or 0.0 for size in sizes]
        rise = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
        return SLOW_STEP_SECONDS <= seconds[1] + rise * (predicted - sizes[1]) < math.inf
