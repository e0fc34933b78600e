"""Whether a search starts from an estimate, and from which. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from batchfinder.bounds import Bounds
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.prober import Prober
from batchfinder.result import Probe

# Most estimates take 1 to 5 seconds. The first large probe, of up to 64 times as many examples, and
# the one that follows it take several times as long as the smallest step; an estimate saves about
# one of them.
SLOW_STEP_SECONDS = 5.0

MakeEstimate: TypeAlias = Callable[[str, int, Bounds], tuple[int | None, list[str]]]
"""From a device's name and budget to the size expected, None if that cannot be told; and what the
user should know."""


class HeadStart:
    """The estimate that a search starts from, made when the smallest size has run.

    Without being asked for it is made where it pays: on an accelerator whose step was slow. There
    it is an extra, of which no failure is told. There is none for the CPU: its heap and its
    libraries take some ten percent beside the tensors, more for some models than for others, and an
    estimate above the answer costs more probes than it saves.

    Args:
        estimate: makes it.
        options: of the probes.
        is_asked_for: whether the user wants it, fast steps or not.

    Attributes:
        batch_size: the estimate; None while there is none.
        notes: what the user should know.
    """

    def __init__(
        self, estimate: MakeEstimate, options: ProbeOptions, *, is_asked_for: bool
    ) -> None:
        self._estimate = estimate
        self._options = options
        self._is_asked_for = is_asked_for
        self.batch_size: int | None = None
        self.notes: list[str] = []

    def after(self, first: Probe, prober: Prober, bounds: Bounds) -> int | None:
        """Where the answer may be, now that the smallest size has run; None: unknown.

        Raises:
            Exception: what the estimate raises, if it was asked for.
        """
        if self._is_asked_for:
            self.batch_size, self.notes = self._made(prober, bounds)
        elif self._pays(first):
            with suppress(Exception):  # the user's code runs in it, and the search goes on
                self.batch_size, _ = self._made(prober, bounds)
        return self.batch_size

    def _made(self, prober: Prober, bounds: Bounds) -> tuple[int | None, list[str]]:
        if prober.device.partition(" ")[0] == "cpu":
            return None, ["the search started without an estimate: there is none for the CPU"]
        return self._estimate(prober.device, prober.budget_bytes, bounds)

    def _pays(self, first: Probe) -> bool:
        # Ranks must all try the same sizes, and their clocks differ. A compiled step takes less
        # than is simulated.
        if self._options.strategy is not None or self._options.compiled:
            return False
        return (first.step_seconds or 0) >= SLOW_STEP_SECONDS
