"""The bracket of a search: the largest size that is proved, and the smallest that failed."""

from __future__ import annotations

import math
from functools import cached_property

from batchfinder.results.probe import Probe

# A confirmation that fails after its first step shows what a probe cannot: the optimizer's states
# now occupy the memory that the activations of the first step had.
STEPS_LIKE_A_PROBE = 1

# The width of the final bracket if the allocator is fragmented, as a share of the size. Closer to
# the limit, sizes that run and sizes that do not alternate (48 simulated searches on an H200,
# scripts/results/search_simulated_gpu.json).
FRAGMENTED_RESOLUTION = 1 / 100

# Readings of a device that is not repeatable differ from run to run. If they differ by less than
# REPEATS, as a share, verdicts repeat. Else the final bracket is 20 of their differences wide,
# since a few readings show little of how much they differ. It is at most 5 % wide, the step by
# which verdicts of a CPU could be distinguished (scripts/results/search_cpu.json).
REPEATS = 1 / 1000
DIFFERENCES = 20
MOST_RESOLUTION = 1 / 20

# If the largest size that ran peaks below this share of the budget, the failure is not by chance.
FAR_FROM_BUDGET = 0.5

# The allocator is fragmented if it holds more than this share of the budget beyond its tensors.
FRAGMENTED = 1 / 200


class Bracket:
    """The sizes between which the answer is, and the probes that show it. It decides nothing.

    Args:
        first: the smallest size allowed.
        last: the largest size allowed.
        unit: every size is a multiple of it.
        budget_bytes: memory that a step may use.
        is_repeatable: True if a size that ran one step will run many, in any process.
        coarseness: the least width of the final bracket, as a share of the size.

    Attributes:
        fits: the probes that fit, by size.
        confirmed: the confirmations that fit, by size.
        failure: the smallest size that failed; None if none has.
        is_fragmented: True once the allocator was seen to hold clearly more than its tensors.
        refuted: the size at which a confirmation refuted what probes show; 0 if none has. From then
            on only confirmations count.
        probes: the number of probes and confirmations.

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
        is_repeatable: bool = True,
        coarseness: float = 0,
    ) -> None:
        self.first, self.last, self.unit = first, last, unit
        self.budget_bytes, self.is_repeatable = budget_bytes, is_repeatable
        self._coarseness = coarseness
        self.fits: dict[int, Probe] = {}
        self.confirmed: dict[int, Probe] = {}
        self.failure: Probe | None = None
        self._failed_when_confirmed = False
        self.is_fragmented = False
        self.probes = self.refuted = self._refutations = 0

    @property
    def high(self) -> int:
        """The smallest size that is excluded: it failed, or is beyond the bounds."""
        return self.failure.batch_size if self.failure else self.last + self.unit

    @property
    def low(self) -> int:
        """The largest size that is proved; one unit below the first size if none is."""
        proofs = self.confirmed if self.refuted else self.fits | self.confirmed
        return max((size for size in proofs if size < self.high), default=self.first - self.unit)

    @property
    def low_confirmed(self) -> int:
        """The largest size that was confirmed; one unit below the first size if none was."""
        sizes = [size for size in self.confirmed if size < self.high]
        return max(sizes, default=self.first - self.unit)

    @property
    def ran(self) -> int:
        """The largest size below ``high`` that ran, proved or not; 0 if none did."""
        return max((size for size in self.fits | self.confirmed if size < self.high), default=0)

    @property
    def resolution(self) -> int:
        """The width of the final bracket, in examples."""
        return self.resolution_at(self.high) if self.failure else self.unit

    def resolution_at(self, size: float) -> int:
        """Return the width of the final bracket below a failure at this size, in examples."""
        thrashes = self.failure is not None and self.failure.is_thrashing
        is_loose = self.is_fragmented or self.refuted or thrashes
        share = max(self._coarseness, FRAGMENTED_RESOLUTION if is_loose else 0)
        if not self.verdicts_repeat:
            differences = min(MOST_RESOLUTION, DIFFERENCES * self.spread)
            share = max(share, FRAGMENTED_RESOLUTION, differences)
        return max(self.unit, math.floor(share * size / self.unit) * self.unit)

    @property
    def verdicts_repeat(self) -> bool:
        """True if a size that ran once will run again."""
        if self.spread < REPEATS:
            return True
        ran = (self.fits | self.confirmed).get(self.ran)
        peak = max(ran.phase_peak_bytes.values(), default=0) if ran else 0
        return self.failure is not None and peak < FAR_FROM_BUDGET * self.budget_bytes

    @cached_property
    def spread(self) -> float:
        """The largest difference of a reading from its neighbors' line, as a share of it."""
        readings = self.fits | self.confirmed
        sizes = sorted(size for size in readings if readings[size].phase_peak_bytes)
        if self.is_repeatable or len(sizes) < 3:
            return 0 if self.is_repeatable else MOST_RESOLUTION / DIFFERENCES
        peaks = {size: max(readings[size].phase_peak_bytes.values()) for size in sizes}
        again = [
            abs(1 - max(self.fits[size].phase_peak_bytes.values(), default=0) / peaks[size])
            for size in self.fits.keys() & self.confirmed.keys() & peaks.keys()
        ]
        misses = [
            abs(1 - (peaks[a] + (peaks[c] - peaks[a]) * (b - a) / (c - a)) / max(1, peaks[b]))
            for a, b, c in zip(sizes, sizes[1:], sizes[2:], strict=False)
        ]
        return max(again + misses)

    @property
    def is_tight(self) -> bool:
        """True if no size is left to try between ``low`` and ``high``."""
        if self.low < self.first:
            return self.high == self.first
        return self.high - self.low <= self.resolution

    @property
    def is_closed(self) -> bool:
        """True if the answer is known: it is confirmed, or even the smallest size failed twice."""
        if self.low in self.confirmed:
            return self.is_tight
        return self.high == self.first and self._failed_when_confirmed

    def record(self, probe: Probe, confirm: bool) -> None:
        """Narrow the bracket by the outcome of a probe."""
        size = probe.batch_size
        self.probes += 1
        vars(self).pop("spread", None)
        unused = (probe.peak_reserved_bytes or 0) - (probe.peak_allocated_bytes or 0)
        self.is_fragmented |= unused > FRAGMENTED * self.budget_bytes
        if probe.fits:
            (self.confirmed if confirm else self.fits)[size] = probe
            if self.failure and size == self.failure.batch_size:  # it had failed by chance
                self.failure, self.fits[size] = None, probe
            return
        grew = probe.steps > STEPS_LIKE_A_PROBE and not probe.is_thrashing
        self._refutations += confirm and (grew or size <= max(self.fits, default=0))
        # If verdicts do not repeat, one or two refutations may be chance, but not three.
        if not self.refuted and self._refutations > 2 * (not self.verdicts_repeat):
            self.refuted = size
        self.failure, self._failed_when_confirmed = probe, confirm
