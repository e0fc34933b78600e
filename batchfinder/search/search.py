"""The search: probe after probe until the answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from batchfinder.results.result import Probe, Status
from batchfinder.search.belief import believe, lines_of
from batchfinder.search.bounds import check_bounds
from batchfinder.search.bracket import Bracket
from batchfinder.search.plan import Move, Prices, candidates, plan

RunProbe: TypeAlias = Callable[[int, bool], Probe]
"""``run(batch_size, confirm) -> Probe``: what the search does not want to know more of."""

MakeGuess: TypeAlias = Callable[[Mapping[int, Probe], float], int | None]
"""``guess(probes, predicted) -> batch size``."""

MEASURED_GROWTH = 1024
BLIND_GROWTH = 16
SECOND_GROWTH = 64
NOISE = 1 / 1000
APPROACH = 0.75
CLOSE = 0.5
MOST = 30
SPARE_PROBES = 8


@dataclass(frozen=True)
class Finding:
    """What a search found.

    Attributes:
        status: how it ended.
        answer: the confirmation at the answer; of a search that was stopped early, the largest
            that ran; None if nothing fits.
        failure: the smallest size that failed; None if none was tried.
    """

    status: Status
    answer: Probe | None
    failure: Probe | None


def search(
    run: RunProbe,
    *,
    budget_bytes: int,
    smallest: int = 1,
    largest: int | None = None,
    multiple_of: int = 1,
    is_repeatable: bool = True,
    guess: MakeGuess | None = None,
    prices: Prices | None = None,
) -> Finding:
    """Find the largest batch size that fits."""
    first, last = check_bounds(smallest, largest, multiple_of)
    bracket = Bracket(first, last, multiple_of, budget_bytes, is_repeatable=is_repeatable)
    prices = prices or (Prices() if is_repeatable else Prices(confirm=6))
    chooser = Chooser(bracket, prices, guess, is_open=largest is None)
    while not bracket.is_closed:
        move = chooser.next_move()
        bracket.record(run(*move), move.confirm)
    confirmation = bracket.confirmed.get(bracket.low)
    if confirmation is None:
        return Finding(Status.NOTHING_FITS, None, bracket.failure)
    status = Status.FOUND if bracket.failure else Status.CAPPED
    return Finding(status, confirmation, bracket.failure)


class Chooser:
    def __init__(self, known, prices, guess, is_open):
        self.known, self.prices, self.is_open = known, prices, is_open
        self._make_guess = guess
        self.guess = None

    def _at(self, size):
        known = self.known
        on_grid = math.floor(min(size, known.high) / known.unit) * known.unit
        on_grid = min(max(on_grid, known.low + known.unit), known.high - known.unit)
        ends = known.high - on_grid <= known.resolution
        return Move(on_grid, ends or known.is_refuted)

    def next_move(self):
        known = self.known
        ran = known.ran
        if not ran or known.high == known.first:
            return Move(known.first, known.high == known.first or known.first == known.last)
        if known.is_tight:
            return Move(known.low, True)
        readings = known.fits | known.confirmed
        if len(readings) == 1 and known.failure is None:
            peak = max(readings[ran].phase_peak_bytes.values(), default=0) or 1
            return self._at(ran * min(max(2 * known.budget_bytes / peak, 2), SECOND_GROWTH))
        if self._spare() < 0:
            return self._at(ran * BLIND_GROWTH if known.failure is None and self.is_open else (known.low + known.high) / 2)
        lines = lines_of(known)
        end = min(lines.tensors.end, known.high)
        if self._make_guess is not None:
            self.guess, self._make_guess = self._make_guess(known.fits, lines.tensors.end), None
            if self.guess is not None and not known.low < self.guess < known.high:
                self.guess = None
        growth = MEASURED_GROWTH if math.isfinite(lines.tensors.end) else BLIND_GROWTH
        limit = growth * ran
        if known.failure is None and self.guess is None:
            if math.isinf(lines.tensors.end):
                return self._at(limit if self.is_open else min(limit, (known.low + known.high) / 2))
            if ran < CLOSE * end:
                cautious = lines_of(known, NOISE * known.budget_bytes).tensors.end
                size = min(APPROACH * end, cautious, limit)
                size = min(size, max(2 * ran, end - 2 * lines.tensors.error))
                return self._at(size)
        belief = believe(known, lines, self.guess)
        high = known.high
        if limit < high:
            high = max(known.low + 2 * known.unit, math.floor(limit / known.unit) * known.unit)
        sizes = candidates(belief, known.low, high, known.unit, known.resolution_at, MOST)
        if len(sizes) < 3:
            return self._at((known.low + known.high) / 2)
        prices = self.prices
        if known.failure and known.failure.is_thrashing:
            prices = replace(prices, failed_confirm=3, failed_probe=2)
        elif known.failure and known.is_refuted:
            prices = replace(prices, failed_confirm=min(known.failure.steps, self.prices.confirm))
        move = plan(
            belief, sizes, known.low in known.confirmed, prices, known.resolution_at,
            not known.is_refuted and known.is_repeatable,
        )
        if move.size == known.low:
            return self._at((known.low + known.high) / 2)
        return move

    def _spare(self):
        known = self.known
        def halvings(low, high, width):
            return math.ceil(math.log2(max(1, (high - low) // width)))
        if known.failure is None and self.is_open:
            return math.inf
        allowed = halvings(known.first, known.last + known.unit, known.unit) + SPARE_PROBES
        left = halvings(known.low, known.high, known.resolution)
        return allowed - known.probes - left - 2
