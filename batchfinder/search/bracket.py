"""The bracket of a search: the largest size that is proved, and the smallest that failed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

from batchfinder.results.memory_model import Phase
from batchfinder.results.probe import Outcome, Probe
from batchfinder.results.throughput import interpolated
from batchfinder.search.bounds import Bounds

# The width of the final bracket if the allocator is fragmented, as a share of the size. Closer to
# the limit, sizes that run and sizes that do not alternate (48 simulated searches on an H200,
# scripts/results/search_simulated_gpu.json).
FRAGMENTED_RESOLUTION = 1 / 100

# The width where steps differ. Closer to the limit, the order of the steps decides: with BERT, one
# of 20 orders ran out of memory at batch size 124, and 15 at 127 (probing/steadiness.py).
DIFFERING_RESOLUTION = 1 / 40

# The allocator is fragmented if it holds more than this share of the budget beyond its tensors.
FRAGMENTED = 1 / 200

# Readings of a device that is not repeatable differ from run to run. If they differ by less than
# REPEATS, as a share, verdicts repeat. Else the final bracket is 20 of their differences wide,
# since a few readings show little of how much they differ. It is at most 5 % wide, the step by
# which verdicts of a CPU could be distinguished (scripts/results/search_cpu.json).
REPEATS = 1 / 1000
DIFFERENCES = 20
MOST_RESOLUTION = 1 / 20

# If verdicts do not repeat, a confirmation needs more than a probe, whose few steps hardly show the
# highest peak: by this number of differences between readings, at most MOST_EXCESS, give or take
# EXCESS_ERROR, all as shares. In the median of the trainings in
# scripts/results/confirmation_cpu.json, it needs 8 % more.
EXCESS_DIFFERENCES, MOST_EXCESS, EXCESS_ERROR = 3, 0.08, 0.03

# If the largest size that ran peaks below this share of the budget, the failure is not by chance.
FAR_FROM_BUDGET = 0.5

# Failures for another reason than memory, after which no guess of memory is believed, and a power
# of two is tried above them. After the first, the size below it is still tried, because an
# operator's largest tensor may be near (EfficientNet in scripts/results/setups.json).
ERRORS = 2


def differing_at(size: int) -> int:
    """Return the width of the final bracket below a failure where steps differ, in examples.

    Example:
        >>> differing_at(71), differing_at(80), differing_at(12)
        (2, 2, 1)
    """
    return math.ceil(DIFFERING_RESOLUTION * size)


class Bracket:
    """The sizes between which the answer is, and the probes that show it. It decides nothing.

    Args:
        bounds: the sizes that may be tried.
        budget_bytes: memory that a step may use.
        is_repeatable: True if a size that ran one step will run many, in any process.
        coarseness: the least width of the final bracket, as a share of the size.
        probes_prove: False if only confirmations count.

    Attributes:
        bounds: the sizes that may be tried.
        fits: the probes that fit, by size.
        confirmed: the confirmations that fit, by size.
        failure: the smallest size that failed; None if none has.
        steps_differ: True once steps of one size were seen to make different requests.
        is_fragmented: True once the allocator was seen to hold clearly more than its tensors.
        refuted: the size at which a confirmation refuted what probes show; 0 if none has. From then
            on only confirmations count.
        probes: the number of probes and confirmations.
        errors: how many of them failed for another reason than memory.
    """

    def __init__(
        self,
        bounds: Bounds,
        budget_bytes: float,
        *,
        is_repeatable: bool = True,
        coarseness: float = 0,
        probes_prove: bool = True,
    ) -> None:
        self.bounds = bounds
        self.budget_bytes, self.is_repeatable = budget_bytes, is_repeatable
        self._coarseness, self._probes_prove = coarseness, probes_prove
        self.fits: dict[int, Probe] = {}
        self.confirmed: dict[int, Probe] = {}
        self.failure: Probe | None = None
        self._failures: list[Probe] = []
        self._failed_when_confirmed = self._tried_power = False
        self.is_fragmented = self.steps_differ = False
        self.probes = self.errors = self.refuted = self._refutations = 0

    @property
    def high(self) -> int:
        """The smallest size that is excluded: it failed, or is beyond the bounds."""
        return self.failure.batch_size if self.failure else self.bounds.after(self.bounds.last)

    @property
    def probes_prove(self) -> bool:
        """True if a size counts as proved that ran without a confirmation."""
        return self._probes_prove and not self.refuted

    @property
    def low(self) -> int:
        """The largest size that is proved; the one before the first size if none is."""
        proofs = self.readings if self.probes_prove else self.confirmed
        before = self.bounds.before(self.bounds.first)
        return max((size for size in proofs if size < self.high), default=before)

    @property
    def low_confirmed(self) -> int:
        """The largest size that was confirmed; the one before the first size if none was."""
        sizes = (size for size in self.confirmed if size < self.high)
        return max(sizes, default=self.bounds.before(self.bounds.first))

    @property
    def ran(self) -> int:
        """The largest size below ``high`` that ran, proved or not; 0 if none did."""
        return max((size for size in self.readings if size < self.high), default=0)

    @property
    def readings(self) -> dict[int, Probe]:
        """What fits, by size: the confirmation where there is one."""
        return self.fits | self.confirmed

    @property
    def resolution(self) -> int:
        """The width of the final bracket, in examples."""
        return self.resolution_at(self.high) if self.failure else self._gap_below(self.high)

    def resolution_at(self, size: int) -> int:
        """Return the width of the final bracket below a failure at this size, in examples."""
        return max(self._gap_below(size), self.coarseness_at(size))

    def _gap_below(self, size: int) -> int:
        return max(self.bounds.multiple_of, size - self.bounds.before(size))

    def coarseness_at(self, size: int) -> int:
        """Return that width where it is more than from one size to the next; else less, or 0."""
        thrashes = self.failure is not None and self.failure.is_thrashing
        is_loose = self.is_fragmented or self.refuted or thrashes or not self.verdicts_repeat
        share = max(self._coarseness, FRAGMENTED_RESOLUTION if is_loose else 0)
        if not self.verdicts_repeat:
            share = max(share, min(MOST_RESOLUTION, DIFFERENCES * self.spread))
        differing = differing_at(size) if self.steps_differ else 0
        return self.bounds.at_most(max(share * size, differing))

    @property
    def verdicts_repeat(self) -> bool:
        """True if a size that ran once will run again."""
        peak = self.readings[self.ran].peak_bytes or 0 if self.ran else 0
        is_far = self.failure is not None and peak < FAR_FROM_BUDGET * self.budget_bytes
        return self.spread < REPEATS or is_far

    @cached_property
    def spread(self) -> float:
        """The largest difference of a reading from its neighbors' line, as a share of it.

        Readings of the phase that needs most at the largest size count. Where another phase needs
        more at small sizes, such as a validation, the bend between them is no difference.
        """
        by_phase = self.readings[self.ran].phase_peak_bytes if self.ran else {}
        phase = max(by_phase, key=lambda each: by_phase[each], default=None)
        points = peaks_of(self.readings, phase)
        if self.is_repeatable or len(points) < 3:
            return 0 if self.is_repeatable else MOST_RESOLUTION / DIFFERENCES
        pairs = [(peak, interpolated(points, size)) for size, peak in peaks_of(self.fits, phase)]
        pairs += [
            (interpolated([a, c], b[0]), b[1])
            for a, b, c in zip(points, points[1:], points[2:], strict=False)
        ]
        return max(abs(1 - other / peak) for other, peak in pairs)

    @property
    def excess(self) -> float:
        """The factor by which confirmations need more than probes of the same size."""
        usual = 1.0
        if self._shows_too_little:
            usual += min(EXCESS_DIFFERENCES * self.spread, MOST_EXCESS)
        size, points = max(self.confirmed, default=0), peaks_of(self.fits)
        if not size or not points or not points[0][0] <= size <= points[-1][0]:
            return usual
        return max(usual, (self.confirmed[size].peak_bytes or 0) / interpolated(points, size))

    @property
    def excess_error(self) -> float:
        """How far off the excess may be, as a share."""
        return EXCESS_ERROR if self._shows_too_little else self.spread

    @property
    def _shows_too_little(self) -> bool:
        """True if readings come from the few steps of probes, and later peaks differ from them."""
        return bool(self.fits) and not self.verdicts_repeat

    @property
    def is_tight(self) -> bool:
        """True if no size is left to try between ``low`` and ``high``."""
        if self.low < self.bounds.first:
            return self.high == self.bounds.first
        return self.high - self.low <= self.resolution

    @property
    def is_closed(self) -> bool:
        """True if the answer is known: it is confirmed, or even the smallest size failed twice."""
        if self.low in self.confirmed:
            return self.is_tight
        return self.high == self.bounds.first and self._failed_when_confirmed

    @property
    def power_of_two(self) -> int | None:
        """The power of two to try above failures for another reason than memory; None if none is.

        Some code asserts that the batch size divides a global batch size. Two such failures, or one
        just above the answer, say that it may. If the power of two runs, only such sizes are tried
        from then on.
        """
        powers = self.bounds.powers_of_two()
        if not self.failure or not is_error(self.failure) or self._tried_power or not powers:
            return None
        is_early = self.errors < ERRORS and not self.is_closed
        has_failed = powers.at_most(self.high) == self.high
        size = powers.after(self.high)
        return None if is_early or has_failed or size > powers.last else size

    def record(self, probe: Probe, confirm: bool) -> None:
        """Narrow the bracket by the outcome of a probe."""
        if probe.most_examples is not None:  # then the first size that has too few fails too
            too_large = self.bounds.after(probe.most_examples)
            probe = replace(probe, batch_size=max(self.bounds.first, too_large))
        size = probe.batch_size
        self.probes += 1
        self.errors += is_error(probe)
        vars(self).pop("spread", None)
        unused = (probe.peak_reserved_bytes or 0) - (probe.peak_allocated_bytes or 0)
        self.steps_differ |= probe.steps_differ
        self.is_fragmented |= unused > FRAGMENTED * self.budget_bytes
        if not probe.fits:
            self._failures.append(probe)
        if self.failure and size > self.failure.batch_size:
            self._tried_power = True
            if not probe.fits:
                return
            self.bounds = self.bounds.powers_of_two() or self.bounds
            left = {each.batch_size: each for each in self._failures if each.batch_size > size}
            powers = [each for each in left if self.bounds.at_most(each) == each]
            self.failure = left[min(powers)] if powers else None
        if probe.fits:
            (self.confirmed if confirm else self.fits)[size] = probe
            if self.failure and size == self.failure.batch_size:  # it had failed by chance
                self.failure, self.fits[size] = None, probe
            return
        # A failure after the first step shows what a probe cannot: the optimizer's states now use
        # the memory that activations had.
        grew = probe.steps > 1 and not probe.is_thrashing
        self._refutations += confirm and (grew or size <= max(self.fits, default=0))
        # If verdicts do not repeat, one or two refutations may be chance, but not three.
        if not self.refuted and self._refutations > 2 * (not self.verdicts_repeat):
            self.refuted = size
        self.failure, self._failed_when_confirmed = probe, confirm


def is_error(probe: Probe) -> bool:
    """Return True if a size failed for another reason than memory, or too little data."""
    return probe.outcome is Outcome.FAILED and probe.most_examples is None


def holes(probes: Iterable[Probe]) -> list[Probe]:
    """Return the errors at sizes below the largest that runs, the smallest first.

    Only powers of two are tried above them.
    """
    verdicts = {probe.batch_size: probe for probe in probes}  # the last one on a size counts
    largest = max((size for size, probe in verdicts.items() if probe.fits), default=0)
    return [p for size, p in sorted(verdicts.items()) if size < largest and is_error(p)]


def peaks_of(readings: Mapping[int, Probe], phase: Phase | None = None) -> list[tuple[int, float]]:
    """Return the peak at each size, the smallest size first; nothing where none was read.

    Args:
        readings: the probe at each size.
        phase: the phase to look at; None for the highest.
    """
    peaks = {
        size: probe.peak_bytes if phase is None else probe.phase_peak_bytes.get(phase)
        for size, probe in sorted(readings.items())
    }
    return [(size, float(peak)) for size, peak in peaks.items() if peak]
