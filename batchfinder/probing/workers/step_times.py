"""How long steps take, and from when on one is taken for hung."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepTimes:
    """How long steps take, and from when on one is taken for hung.

    Attributes:
        unknown_seconds: for the first step of all, which may well compile kernels.
        factor: this many times what the slowest step so far would take at the size;
        margin_seconds: and this long beyond it;
        least_seconds: but never less than this.
    """

    unknown_seconds: float = 600.0
    factor: float = 20.0
    margin_seconds: float = 0.0
    least_seconds: float = 600.0
    _largest: int = 0
    _slowest_seconds: float = 0.0
    _slowest_start_seconds: float = 0.0

    def note(self, batch_size: int, step_seconds: float) -> None:
        """Remember what a step took."""
        self._largest = max(self._largest, batch_size)
        self._slowest_seconds = max(self._slowest_seconds, step_seconds)

    def note_start(self, seconds: float) -> None:
        """Remember what the first step of a worker took."""
        self._slowest_start_seconds = max(self._slowest_start_seconds, seconds)

    def note_compiling(self) -> None:
        """Remember that some later step may compile again, for another size."""
        self.margin_seconds = max(self.margin_seconds, self.unknown_seconds)

    def patience_seconds(self, batch_size: int, is_first_step: bool) -> float:
        """How long to wait for a step of a worker."""
        if not self._largest:
            return self.unknown_seconds
        expected = self._slowest_seconds * max(1.0, batch_size / self._largest)
        if is_first_step:
            expected = max(expected, self._slowest_start_seconds)
        return max(self.least_seconds, self.factor * expected + self.margin_seconds)
