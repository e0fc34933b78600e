"""Whether a search starts from an estimate, and from which. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from batchfinder.search.bounds import Bounds
from batchfinder.search.prober import Prober
from batchfinder.search.search import MakeGuess

MakeEstimate: TypeAlias = Callable[[str, int, Bounds], tuple[int | None, list[str]]]
"""From a device's name and budget to the size expected, None if that cannot be told; and what the
user should know."""


class HeadStart:
    """The estimate that a search starts from.

    The simulated one is made because the user asks for it. There is none for the CPU: its heap and
    its libraries take some ten percent beside the tensors, more for some models than for others,
    and an estimate above the answer costs more probes than it saves.

    Args:
        estimate: makes the simulated one; None: the user did not ask for it.
        rehearse: replays what two small confirmations asked the allocator for, and returns the
            largest size that fits, or None; None where nothing is recorded.

    Attributes:
        batch_size: the simulated estimate; None while there is none.
        notes: what the user should know.
    """

    def __init__(
        self,
        estimate: MakeEstimate | None = None,
        rehearse: Callable[[], int | None] | None = None,
    ) -> None:
        self._estimate = estimate
        self._rehearse = rehearse
        self.batch_size: int | None = None
        self.notes: list[str] = []

    @property
    def rehearses(self) -> bool:
        """Whether the guess wants two small sizes confirmed first."""
        return self._rehearse is not None and self._estimate is None

    def of(self, prober: Prober, bounds: Bounds) -> MakeGuess | None:
        """What a search asks where the answer may be; None: there is nothing to ask.

        Args:
            prober: that runs the search.
            bounds: its smallest size, the largest or None, and what each is a multiple of.
        """
        estimate = self._estimate
        if estimate is None:
            return self._rehearse

        def guess() -> int | None:
            if prober.device.partition(" ")[0] == "cpu":
                self.notes = ["the search started without an estimate: there is none for the CPU"]
                return None
            self.batch_size, self.notes = estimate(prober.device, prober.budget_bytes, bounds)
            return self.batch_size

        return guess
