"""The search: which batch size to try next, and when to stop.

Pure integers, guided by the memory model, safe without it. The state is a bracket: ``low``, the
largest size that fits, and ``high``, the smallest that does not. While nothing has failed, the
model's lines are extended, more boldly the clearer they are; then the bracket is closed around the
predicted maximum, and bisected where the model does not help (the safeguard of Brent's and of the
ITP method, https://en.wikipedia.org/wiki/ITP_method).

A size whose success would end the search is confirmed at once instead of being probed first: the
confirmation costs several full steps, and so runs only where the answer is expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from batchfinder.errors import UsageError
from batchfinder.result import Probe, Status

RunProbe: TypeAlias = Callable[[int, bool], Probe]
"""``run(batch_size, confirm) -> Probe``: what the search does not want to know more of."""

# Where nothing runs out and no maximum was given, the search ends here: no optimizer step takes
# sixteen million examples.
UNLIMITED_BATCH_SIZE = 2**24

# Readings are trusted to this share of the budget: a slope that two small sizes show less clearly
# than that is not extended all the way.
READING_NOISE = 1 / 1000

# The second size is chosen without a slope: far enough to see one, cheap against the answer.
SECOND_SIZE_FACTORS = (2, 16)

# While nothing has failed: go this far towards the predicted maximum, and once there has been a
# reading beyond CLOSE_ENOUGH of it, to the first size that should fail.
APPROACH = 0.75
CLOSE_ENOUGH = 0.5

# Where the readings show no growth at all, sizes grow by this factor.
BLIND_GROWTH = 16

# A secant goes through the largest fit and one at most this share of it: between two sizes close to
# each other it would show little but noise.
APART = 0.8

# A model that is wrong by this share of the budget is not followed further than the probes allow
# that bisection would have to spare.
WRONG_BY = 1 / 4

# A model that keeps promising more than it holds is not followed for ever either.
MAX_EXTENSIONS = 4

# Where the model promised a size that then failed, the next try is this share smaller.
RETREAT = 1 / 64

# Probes beyond bisection's own that the search may spend on following the model.
SPARE_PROBES = 4


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


def check_bounds(smallest: int, largest: int | None, multiple_of: int) -> tuple[int, int]:
    """The first and the last size that a search may try.

    Args:
        smallest: the smallest size allowed.
        largest: the largest size allowed; None: :data:`UNLIMITED_BATCH_SIZE`.
        multiple_of: every size tried is a multiple of it.

    Returns:
        The smallest and the largest multiple within the bounds.

    Raises:
        UsageError: a bound is not positive, or no multiple lies within them.
    """
    for name, value in (("min", smallest), ("max", largest)):
        if value is not None and value < 1:
            raise UsageError(f"the {name}imum batch size must be at least 1, not {value}")
    if multiple_of < 1:
        raise UsageError(f"multiple_of must be at least 1, not {multiple_of}")
    first = -(-smallest // multiple_of) * multiple_of
    last = (largest if largest is not None else max(UNLIMITED_BATCH_SIZE, first)) // multiple_of
    last *= multiple_of
    if first > last:
        raise UsageError(
            f"no multiple of {multiple_of} lies between the smallest batch size {smallest} and "
            f"the largest {largest}; change one of the three"
        )
    return first, last


def search(
    run: RunProbe,
    *,
    budget_bytes: int,
    smallest: int = 1,
    largest: int | None = None,
    multiple_of: int = 1,
) -> Finding:
    """Find the largest batch size that fits.

    Args:
        run: runs one size and says how it ended.
        budget_bytes: what a step may use; guides the model.
        smallest: the smallest size allowed.
        largest: the largest size allowed; None: :data:`UNLIMITED_BATCH_SIZE`.
        multiple_of: every size tried is a multiple of it.

    Returns:
        The confirmed answer and the failure above it. The answer was run; no size was probed
        twice or confirmed twice; none lay outside the bounds.

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
    bracket = _Bracket(first, last, multiple_of, budget_bytes, is_open=largest is None)
    while not bracket.is_closed:
        batch_size = bracket.next_size()
        confirm = bracket.would_end_with(batch_size)
        bracket.record(run(batch_size, confirm), confirm)
    return bracket.finding()


class _Bracket:
    """What is known so far: the sizes that fit, and the smallest that does not."""

    def __init__(self, first: int, last: int, unit: int, budget_bytes: int, is_open: bool) -> None:
        self.first, self.last, self.unit = first, last, unit
        self.budget_bytes = budget_bytes
        self.is_open = is_open
        self.fits: dict[int, Probe] = {}
        self.confirmation: Probe | None = None
        self.failure: Probe | None = None
        self.probes = 0
        self.extensions = 0
        self.retreats = 0
        self.model_is_useless = False
        self.needs_confirmations = False

    @property
    def low(self) -> int:
        """The largest size that fits; one unit below the first one while none is known."""
        return max(self.fits, default=self.first - self.unit)

    @property
    def high(self) -> int:
        """The smallest size that is out: it failed, or lies beyond the bounds."""
        return self.failure.batch_size if self.failure else self.last + self.unit

    @property
    def is_closed(self) -> bool:
        is_tight = self.high - self.low <= self.unit
        return is_tight and (not self.fits or self.confirmation is not None)

    def would_end_with(self, batch_size: int) -> bool:
        """Whether the search is over if this size fits, or a mere probe would prove nothing.

        Where a confirmation has failed, several steps ask for more memory than one: from then on
        only confirmations tell.
        """
        is_last = batch_size == self.high - self.unit
        return is_last or batch_size in self.fits or self.needs_confirmations

    def record(self, probe: Probe, confirm: bool) -> None:
        self.probes += 1
        if len(self.fits) > 1:
            self.model_is_useless |= self._refutes_the_model(probe)
        if probe.fits:
            self.fits[probe.batch_size] = probe
            self.confirmation = probe if confirm else None
            return
        # A confirmation that fails refutes what a probe had shown.
        self.fits.pop(probe.batch_size, None)
        self.failure = probe
        self.needs_confirmations |= confirm

    def finding(self) -> Finding:
        if not self.fits:
            return Finding(Status.NOTHING_FITS, None, self.failure)
        status = Status.FOUND if self.failure else Status.CAPPED
        return Finding(status, self.confirmation, self.failure)

    def next_size(self) -> int:
        if not self.fits:
            return self.first
        if self.high - self.low <= self.unit:
            return self.low
        if self.model_is_useless and not self._has_probes_to_spare():
            return self._inside(self._bisect())
        if len(self.fits) == 1:
            return self._inside(self._second_size() if self.failure is None else self._bisect())
        if self.failure is None:
            return self._inside(self._extend())
        return self._inside(self._close_in())

    def _inside(self, size: float) -> int:
        """The nearest size on the grid that is strictly inside the bracket."""
        size = min(size, self.high)
        on_grid = math.floor(size / self.unit) * self.unit
        return min(max(on_grid, self.low + self.unit), self.high - self.unit)

    def _refutes_the_model(self, probe: Probe) -> bool:
        """Whether a probe shows that the lines say nothing about this device.

        They may overrate the growth: small sizes do not show it well. But no growth where there
        is some, or a failure far below the predicted maximum, is another matter.
        """
        predicted = self._predicted_maximum()
        if math.isinf(predicted):
            return not probe.fits
        slope = (self.budget_bytes - self._peak(self.low)) / (predicted - self.low)
        expected = self._peak(self.low) + slope * (probe.batch_size - self.low)
        tolerated = WRONG_BY * self.budget_bytes
        if probe.fits:
            return self._peak_of(probe) > expected + tolerated
        return expected < self.budget_bytes - tolerated

    def _has_probes_to_spare(self) -> bool:
        """Whether bisection could still finish in time if the next probe taught nothing."""
        whole = math.ceil(math.log2((self.last - self.first) // self.unit + 1))
        left = math.ceil(math.log2((self.high - self.low) // self.unit))
        spent_then = self.probes + 1 + left + 1  # the last one: the confirmation
        return spent_then <= whole + SPARE_PROBES

    def _bisect(self) -> float:
        if self.failure is None and self.is_open:
            return self.low * BLIND_GROWTH
        return self.low + (self.high - self.low) / 2

    def _peak_of(self, probe: Probe) -> int:
        return max(probe.phase_peak_bytes.values(), default=0)

    def _peak(self, batch_size: int) -> int:
        return self._peak_of(self.fits[batch_size])

    def _second_size(self) -> float:
        # Were all of the first peak due to its samples, this many times as many would fill the
        # budget; some of it never is, so twice that is likely to fit and still cheap.
        times = 2 * self.budget_bytes / max(self._peak(self.low), 1)
        least, most = SECOND_SIZE_FACTORS
        return self.low * min(max(times, least), most)

    def _predicted_maximum(self, noise_bytes: float = 0) -> float:
        """Where the secants through the largest fits meet the budget; inf if none rises.

        ``noise_bytes`` is added to the growth between the two, which makes it pessimistic.
        """
        low = self.low
        apart = [size for size in self.fits if size <= APART * low]
        lower = max(apart) if apart else min(self.fits)
        peaks, peaks_before = self.fits[low].phase_peak_bytes, self.fits[lower].phase_peak_bytes
        maximum = math.inf
        for phase in peaks.keys() & peaks_before.keys():
            growth = peaks[phase] - peaks_before[phase] + noise_bytes
            if growth > 0:
                room = max(0, self.budget_bytes - peaks[phase])
                maximum = min(maximum, low + room / growth * (low - lower))
        return maximum

    def _extend(self) -> float:
        """The next size while nothing has failed."""
        self.extensions += 1
        self.model_is_useless |= self.extensions > MAX_EXTENSIONS
        predicted = self._predicted_maximum()
        if self.low >= CLOSE_ENOUGH * predicted:
            return predicted + self.unit
        pessimistic = self._predicted_maximum(READING_NOISE * self.budget_bytes)
        if math.isinf(predicted):
            return min(pessimistic, self.low * BLIND_GROWTH)
        return min(pessimistic, APPROACH * predicted)

    def _close_in(self) -> float:
        """The next size between one that fits and one that does not."""
        predicted = self._predicted_maximum()
        if predicted < self.high - self.unit:
            # One above the prediction: its failure makes the prediction the last candidate.
            return predicted + self.unit
        # The model promised what has just failed. It may be off by a hair, or by the few percent
        # that fragmentation takes: step back from the failure further each time.
        self.retreats += 1
        if self.retreats == 1:
            return self.high - self.unit
        return max(self._bisect(), self.high * (1 - RETREAT * 2 ** (self.retreats - 2)))
