"""Whether a search starts from an estimate, and from which. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.prober import Prober
from batchfinder.result import Probe

# Most estimates take 1 to 5 seconds. The first large probe, of up to 64 times as many examples, and
# the one that follows it take several times as long as the smallest step; an estimate saves about
# one of them.
SLOW_STEP_SECONDS = 5.0

Bounds: TypeAlias = tuple[int, int | None, int]
"""The smallest batch size, the largest or None, and what each is a multiple of."""

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
        if not self._is_asked_for and not self._pays(first):
            return None
        if prober.device.partition(" ")[0] == "cpu":
            if self._is_asked_for:
                self.notes = ["the search started without an estimate: there is none for the CPU"]
            return None
        try:
            estimated, notes = self._estimate(prober.device, prober.budget_bytes, bounds)
        except Exception:  # the user's code runs in it
            if self._is_asked_for:
                raise
            return None
        self.batch_size = estimated
        if self._is_asked_for:
            self.notes = notes
        return estimated

    def _pays(self, first: Probe) -> bool:
        # Ranks must all try the same sizes, and their clocks differ. A compiled step takes less
        # than is simulated.
        if self._options.strategy is not None or self._options.compiled:
            return False
        return (first.step_seconds or 0) >= SLOW_STEP_SECONDS
