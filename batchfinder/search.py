"""The search: which batch size to try next, and when to stop.

Pure integers, guided by the memory model, safe without it. The state is a bracket: ``low``, the
largest size that fits, and ``high``, the smallest that does not. While nothing has failed, the
model's lines are extended, more boldly the clearer they are; then the bracket is closed around the
predicted maximum. Where the prediction was wrong, the search steps away from it in growing strides,
and bisects where that does not help either (the safeguard of Brent's and of the ITP method,
https://en.wikipedia.org/wiki/ITP_method).

A size whose success would end the search is confirmed at once instead of being probed first: the
confirmation costs several full steps, and so runs only where the answer is expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from batchfinder.bounds import check_bounds
from batchfinder.result import Probe, Status

_Grid: TypeAlias = tuple[int, int, int]
RunProbe: TypeAlias = Callable[[int, bool], Probe]
"""``run(batch_size, confirm) -> Probe``: what the search does not want to know more of."""

# Batches are made in host memory, whose end is not tested: no size is more than so many times the
# largest that has run, where its memory was seen to rise and where it was not.
MEASURED_GROWTH = 1024
BLIND_GROWTH = 16

# Readings are trusted to this share of the budget: a slope that two small sizes show less clearly
# than that is not extended all the way.
READING_NOISE = 1 / 1000

# While nothing has failed: go this far towards the predicted maximum, and once there has been a
# reading beyond CLOSE_ENOUGH of it, to the first size that should fail.
APPROACH = 0.75
CLOSE_ENOUGH = 0.5

# A slope is taken between the largest reading and one at most this share of it: between two sizes
# close to each other it would show little but noise.
APART = 0.9

# What fits beyond the predicted maximum, or fails below it, is passed by this share of the size:
# fragmentation takes a few percent. Twice as far each further time.
STRIDE = 1 / 32

# A failure below this share of the predicted maximum shows that the model is no guide.
TRUST = 0.8

# After so many probes in a row that did not halve the bracket, it is bisected.
PATIENCE = 3

# What a search may take beyond the probes that bisection needs, with a model and without.
SPARE_PROBES_WITH_MODEL = 8
SPARE_PROBES = 4

# Where one confirmation does not speak for the next one, the answer needs two, unless its peak is
# at most this share of the budget.
FAR_FROM_THE_LIMIT = 0.9

# A probe runs with the optimizer's states in place, as the second step of a confirmation does; a
# confirmation that fails later than that has seen what no probe sees.
STEPS_LIKE_A_PROBE = 2


@dataclass(frozen=True)
class Finding:
    """What a search found.

    Attributes:
        status: FOUND, CAPPED or NOTHING_FITS.
        confirmation: the confirmation at the answer; None if nothing fits.
        failure: the smallest size that failed; None if none was tried.
    """

    status: Status
    confirmation: Probe | None
    failure: Probe | None


def search(
    run: RunProbe,
    *,
    budget_bytes: int,
    smallest: int = 1,
    largest: int | None = None,
    multiple_of: int = 1,
    is_repeatable: bool = True,
    guess: int | None = None,
) -> Finding:
    """Find the largest batch size that fits.

    Args:
        run: runs one size and says how it ended.
        budget_bytes: what a step may use; guides the model.
        smallest: the smallest size allowed.
        largest: the largest size allowed; None: 16 million.
        multiple_of: every size tried is a multiple of it.
        is_repeatable: whether a size that ran one step will run many, in any process. If not,
            only confirmations count from the first failure on, and the answer needs two.
        guess: where the answer may be; tried right after the smallest size.

    Returns:
        The confirmed answer, and the failure one unit above it unless the answer is the last size
        allowed. No size was probed or confirmed twice; none lay outside the bounds. With
        ``n`` sizes allowed there were at most ``log2(n) + 4`` probes where readings say nothing,
        ``log2(n) + 8`` whatever they say, and a few more where no maximum was given. Where a
        confirmation refutes a probe, the search starts over below it, under the same limit.

    Raises:
        UsageError: the bounds leave no size to try.
        Exception: whatever ``run`` raises.

    Example:
        >>> from batchfinder.result import Outcome
        >>> def run(batch_size, confirm):
        ...     fits = Outcome.FITS if batch_size <= 37 else Outcome.OOM
        ...     return Probe(batch_size, fits, steps=1, seconds=0.0)
        >>> search(run, budget_bytes=1000).confirmation.batch_size
        37
    """
    first, last = check_bounds(smallest, largest, multiple_of)
    grid = first, last, multiple_of
    bracket = _Bracket(grid, budget_bytes, guess, largest is None, is_repeatable)
    while not bracket.is_closed:
        batch_size = bracket.next_size()
        confirm = bracket.would_end_with(batch_size)
        bracket.record(run(batch_size, confirm), confirm)
    return bracket.finding()


class _Bracket:
    """What is known so far, and the size to try next."""

    def __init__(
        self, grid: _Grid, budget_bytes: int, guess: int | None, is_open: bool, is_repeatable: bool
    ) -> None:
        self.first, self.last, self.unit = grid
        self.budget_bytes, self.guess = budget_bytes, guess
        self.is_open, self.is_repeatable = is_open, is_repeatable
        self.fits: dict[int, Probe] = {}
        self.confirmed: dict[int, Probe] = {}
        self.confirmed_twice: set[int] = set()
        self.failure: Probe | None = None
        self.needs_confirmations = False
        self.probes = 0
        self.failures_in_a_row = 0
        self.misses_in_a_row = 0
        self.overruns = 0

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
    def is_tight(self) -> bool:
        return self.high - self.low <= self.unit

    @property
    def is_closed(self) -> bool:
        return self.is_tight and (self.low < self.first or self._is_proved(self.low))

    def _is_proved(self, size: int) -> bool:
        if self.is_repeatable or size in self.confirmed_twice or size not in self.confirmed:
            return size in self.confirmed
        peak = max(self.confirmed[size].phase_peak_bytes.values(), default=self.budget_bytes)
        return peak <= FAR_FROM_THE_LIMIT * self.budget_bytes

    def would_end_with(self, batch_size: int) -> bool:
        """Whether the search is over if this size fits, or a mere probe would prove nothing."""
        is_last = batch_size in (self.low, self.high - self.unit)
        return is_last or self.needs_confirmations

    def record(self, probe: Probe, confirm: bool) -> None:
        """Narrow the bracket by what a probe has shown."""
        size, had_failed, width = probe.batch_size, self.failure is not None, self.high - self.low
        self.probes += 1
        if probe.fits:
            if size in self.confirmed:
                self.confirmed_twice.add(size)
            (self.confirmed if confirm else self.fits)[size] = probe
            self.failures_in_a_row = 0
        else:
            self.failure = probe
            self.failures_in_a_row += 1
        has_halved = self.high - self.low <= width / 2
        self.misses_in_a_row = 0 if has_halved or not had_failed else self.misses_in_a_row + 1
        goes_beyond_probes = size in self.fits or probe.steps > STEPS_LIKE_A_PROBE
        refutes_probes = (confirm and goes_beyond_probes) or not self.is_repeatable
        if not probe.fits and refutes_probes and not self.needs_confirmations:
            # Several steps ask for more than one: from here on only confirmations tell.
            self.needs_confirmations = True
            self.probes = self.misses_in_a_row = 0

    def finding(self) -> Finding:
        confirmation = self.confirmed.get(self.low)
        if confirmation is None:
            return Finding(Status.NOTHING_FITS, None, self.failure)
        status = Status.FOUND if self.failure else Status.CAPPED
        return Finding(status, confirmation, self.failure)

    def next_size(self) -> int:
        """The size to try next: inside the bracket, or ``low`` where nothing is left inside."""
        if not self.fits:
            return self.first
        if self.is_tight:
            return self.low
        on_grid = math.floor(min(self._choose(), self.high) / self.unit) * self.unit
        return min(max(on_grid, self.low + self.unit), self.high - self.unit)

    def _choose(self) -> float:
        if self.misses_in_a_row >= PATIENCE or not self._has_probes_to_spare():
            return self._bisect()
        return self._extend() if self.failure is None else self._close_in()

    def _has_probes_to_spare(self) -> bool:
        """Whether bisection could still finish in time if the next probe taught nothing."""
        spare = SPARE_PROBES if self._is_misled() else SPARE_PROBES_WITH_MODEL
        allowed = _halvings(self.first, self.last + self.unit, self.unit) + spare
        left = _halvings(self.low, self.high, self.unit)
        return self.probes + 1 + left + 1 <= allowed  # the last one: the confirmation

    def _is_misled(self) -> bool:
        """Whether the model says nothing, or was wrong by more than fragmentation explains."""
        return TRUST * self._predicted_maximum() > self.high

    def _bisect(self) -> float:
        if self.failure is None and self.is_open:
            return self.low * BLIND_GROWTH
        return (self.low + self.high) / 2

    def _extend(self) -> float:
        """The next size while nothing has failed."""
        if len(self.fits) == 1:
            # Were all of the first peak due to its samples, this many times as many would fill
            # the budget; some of it never is, so twice that likely fits and is still cheap.
            peak = max(self.fits[self.low].phase_peak_bytes.values(), default=0) or 1
            growth = min(max(2 * self.budget_bytes / peak, 2), BLIND_GROWTH)
            return self.guess or self.low * growth
        predicted = self._predicted_maximum()
        if self.low < CLOSE_ENOUGH * predicted:
            growth = BLIND_GROWTH if math.isinf(predicted) else MEASURED_GROWTH
            cautious = self._predicted_maximum(READING_NOISE * self.budget_bytes)
            return min(cautious, APPROACH * predicted, self.low * growth)
        self.overruns += 1
        if self.overruns == 1:
            return predicted + self.unit
        return max(predicted + self.unit, self.low * (1 + STRIDE * 2.0 ** (self.overruns - 2)))

    def _close_in(self) -> float:
        """The next size between one that fits and one that does not."""
        predicted = self._predicted_maximum()
        if predicted < self.high - self.unit:
            # One above the prediction: its failure makes the prediction the last candidate.
            return predicted + self.unit
        if predicted < self.high:
            return self.high - self.unit
        if self._is_misled() and not self.needs_confirmations:
            return self._bisect()
        # The first two failures are those of the predicted maximum and of the size above it.
        stride = STRIDE * 2.0 ** max(0, self.failures_in_a_row - 2)
        return max(self._bisect(), self.high * (1 - stride))

    def _predicted_maximum(self, noise_bytes: float = 0) -> float:
        """Where the lines of the phases meet the budget; inf if none rises.

        Slopes come from probes only; a confirmation, from scratch, may read otherwise. The lines
        start at the largest size that fits. ``noise_bytes``, added to the rise, is caution.
        """
        start = self.confirmed.get(self.low)
        if start is None and not self.needs_confirmations:
            start = self.fits.get(self.low)
        if start is None:
            return math.inf
        upper = max(self.fits)
        lower = max((size for size in self.fits if size <= APART * upper), default=min(self.fits))
        peaks, lower_peaks = self.fits[upper].phase_peak_bytes, self.fits[lower].phase_peak_bytes
        maximum = math.inf
        for phase in start.phase_peak_bytes.keys() & peaks.keys() & lower_peaks.keys():
            rise = peaks[phase] - lower_peaks[phase]
            if rise > 0:
                room = max(0, self.budget_bytes - start.phase_peak_bytes[phase])
                reach = room / (rise + noise_bytes) * (upper - lower)
                maximum = min(maximum, self.low + reach)
        return maximum


def _halvings(low: int, high: int, unit: int) -> int:
    """How often a bracket must be halved until nothing lies inside."""
    return math.ceil(math.log2((high - low) // unit))
