"""What a search knows so far: the largest size that fits, and the smallest that does not."""

from __future__ import annotations

import math

from batchfinder.results.result import Probe

# A confirmation that fails after its first step has seen what no probe does: the optimizer's states
# lie where the activations of that step were.
STEPS_LIKE_A_PROBE = 1

# A probe from scratch runs so many steps: where a confirmation fails in them, no probe would fit.
STEPS_OF_A_PROBE = 2

# So many confirmations may flush the allocator's cache before that is held against probes.
CHANCES = 2

# How close the bracket is drawn where the allocator is fragmented: which sizes near the limit run,
# and which only by flushing its cache, is a matter of how their tensors happen to lie.
FRAGMENTED_RESOLUTION = 1 / 100

# What the allocator holds beyond its tensors, as a share of the budget, that counts as fragmented.
FRAGMENTED = 1 / 200


class Bracket:
    """The sizes between which the answer lies, and what was seen of them.

    Args:
        first: the smallest size allowed.
        last: the largest size allowed.
        unit: every size is a multiple of it.
        budget_bytes: what a step may use.
        resolution: share of a size; the bracket is drawn no closer than that, nor than a unit.
        is_repeatable: whether a size that ran one step will run many, in any process.

    Attributes:
        fits: the probes that fitted, by size.
        confirmed: the confirmations that did, by size.
        failure: the smallest size that failed; None while there is none.
        is_fragmented: whether the allocator was seen to hold clearly more than its tensors.
        needs_confirmations: whether a probe that fits proves nothing; for the search to set too.
        probes: how many ran, since a confirmation showed that if one did.
        failures_in_a_row: how many of them failed last.
        misses_in_a_row: how many last ones did not halve the bracket.

    Example:
        >>> from batchfinder.results.result import Outcome
        >>> bracket = Bracket(1, 100, unit=1, budget_bytes=1000)
        >>> bracket.record(Probe(60, Outcome.OOM, steps=1, seconds=0.0), confirm=False)
        >>> bracket.record(Probe(59, Outcome.FITS, steps=3, seconds=0.0), confirm=True)
        >>> bracket.low, bracket.high, bracket.is_closed
        (59, 60, True)
    """

    def __init__(
        self,
        first: int,
        last: int,
        unit: int,
        budget_bytes: float,
        *,
        resolution: float = 0,
        is_repeatable: bool = True,
    ) -> None:
        self.first, self.last, self.unit = first, last, unit
        self.budget_bytes, self.is_repeatable = budget_bytes, is_repeatable
        self._resolution = resolution
        self.fits: dict[int, Probe] = {}
        self.confirmed: dict[int, Probe] = {}
        self.failure: Probe | None = None
        self._failed_when_confirmed = False
        self.is_fragmented = self.needs_confirmations = False
        self.probes = self.failures_in_a_row = self.misses_in_a_row = self._thrashed = 0

    @property
    def low(self) -> int:
        """The largest size that fits; one unit below the first one while none is known."""
        proofs = self.confirmed if self.needs_confirmations else self.fits | self.confirmed
        return max((size for size in proofs if size < self.high), default=self.first - self.unit)

    @property
    def high(self) -> int:
        """The smallest size that is out: it failed, or lies beyond the bounds."""
        return self.failure.batch_size if self.failure else self.last + self.unit

    @property
    def middle(self) -> float:
        """Halfway between the two."""
        return (self.low + self.high) / 2

    @property
    def failure_is_thrashing(self) -> bool:
        """Whether the smallest size that failed ran, if only by flushing the allocator's cache."""
        return self.failure is not None and self.failure.is_thrashing

    @property
    def failed_like_a_probe(self) -> bool:
        """Whether the smallest size that failed did so in the steps that a probe runs, too."""
        return self.failure is not None and self.failure.steps <= STEPS_OF_A_PROBE

    @property
    def resolution(self) -> int:
        """How close the bracket is drawn."""
        if self.failure is None:
            return self.unit
        # Several steps that need more than one do so by how tensors come to lie: by chance, too.
        is_loose = self.is_fragmented or self.failure_is_thrashing or self.needs_confirmations
        share = max(self._resolution, FRAGMENTED_RESOLUTION * is_loose)
        return max(self.unit, math.floor(share * self.high / self.unit) * self.unit)

    @property
    def is_tight(self) -> bool:
        """Whether no size is left to try between the two."""
        if self.low < self.first:
            return self.high == self.first
        return self.high - self.low <= self.resolution

    @property
    def is_closed(self) -> bool:
        """Whether the answer is known: confirmed, or that even the smallest size fails, twice."""
        if self.low in self.confirmed:
            return self.is_tight
        return self.high == self.first and self._failed_when_confirmed

    def holds(self, size: float) -> bool:
        """Whether a size lies inside."""
        return self.low + self.unit <= size <= self.high - self.unit

    def would_end_with(self, batch_size: int) -> bool:
        """Whether the search is over if this size fits, or a mere probe would prove nothing."""
        is_last = batch_size == self.low or self.high - batch_size <= self.resolution
        return is_last or self.needs_confirmations

    def record(self, probe: Probe, confirm: bool) -> None:
        """Narrow the bracket by what a probe has shown."""
        size, had_failed, width = probe.batch_size, self.failure is not None, self.high - self.low
        self.probes += 1
        unused = (probe.peak_reserved_bytes or 0) - (probe.peak_allocated_bytes or 0)
        self.is_fragmented |= unused > FRAGMENTED * self.budget_bytes
        if probe.fits:
            (self.confirmed if confirm else self.fits)[size] = probe
            self.failures_in_a_row = 0
            if self.failure and size == self.failure.batch_size:  # it had failed by chance
                self.failure, self.fits[size] = None, probe
        else:
            self.failure, self._failed_when_confirmed = probe, confirm
            self.failures_in_a_row += 1
        has_halved = self.high - self.low <= math.ceil(width / 2 / self.unit) * self.unit
        self.misses_in_a_row = 0 if has_halved or not had_failed else self.misses_in_a_row + 1
        goes_beyond_probes = size in self.fits or probe.steps > STEPS_LIKE_A_PROBE
        # Whether a size thrashes mostly shows in probes too, and says little of others.
        is_telling = not probe.is_thrashing or size in self.fits or self._thrashed >= CHANCES
        self._thrashed += confirm and probe.is_thrashing
        refutes_probes = confirm and is_telling and (goes_beyond_probes or not self.is_repeatable)
        if not probe.fits and refutes_probes and not self.needs_confirmations:
            # Several steps ask for more than one: from here on only confirmations tell.
            self.needs_confirmations = True
            self.probes = self.misses_in_a_row = 0

    def largest_that_ran(self) -> Probe | None:
        """The proof of ``low``; else the largest probe below ``high``, if probes tell anything."""
        if self.low in self.confirmed:
            return self.confirmed[self.low]
        if self.needs_confirmations and self.is_repeatable:
            return None
        sizes = [size for size in self.fits if size < self.high]
        return self.fits[max(sizes)] if sizes else None
