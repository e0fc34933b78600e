"""The search for the largest batch at many example sizes, in few probes.

A whole search runs at the smallest examples. What it and a few readings tell of the memory at
other example sizes (:mod:`~batchfinder.studies.scaling`) then names one size for each, which is
confirmed; a confirmation that fails, or has much room left, corrects what is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from batchfinder.finder import run_search
from batchfinder.results.probe import Probe
from batchfinder.results.result import Status
from batchfinder.search.bounds import Bounds, check_bounds
from batchfinder.search.prober import Prober
from batchfinder.studies.scaling import Scaling

# How far below a failure, or below what is predicted, an answer may be, as a share. Searches on a
# device that is not repeatable end as close (search/bracket.py).
CLOSE = 0.05

# How much further than predicted one more example may reach: predictions are a few percent off.
REACH = 0.03

# Confirmations at one example size. If none of them fits, sizes tell nothing of each other, and it
# has a whole search of its own.
MOST_TRIES = 5


@dataclass
class Answer:
    """What was found at one example size.

    Attributes:
        batch_size: the largest that was confirmed; 0 if none was.
        probes: what was run.
        warnings: what the user should know.
    """

    batch_size: int = 0
    probes: list[Probe] = field(default_factory=list)
    warnings: tuple[str, ...] = ()


class SizeSweep:
    """Finds the largest batch size at one example size after another.

    Args:
        bounds: the smallest batch size, the largest or None, and what each is a multiple of.

    Attributes:
        scaling: what is known of the memory.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.scaling = Scaling()
        self._bounds = bounds
        self._first, self._last = check_bounds(*bounds)
        # The share of the budget at which the first answer stood; what is left is lost to gaps.
        self._level = 0.0

    def find(self, prober: Prober, x: float | None) -> Answer:
        """Find the largest batch size with a prober.

        Args:
            prober: trains on examples of this size.
            x: the example size; None: it tells nothing, and each has a search of its own.

        Raises:
            Exception: whatever the prober raises.
        """
        if x is None or not self.scaling.per_sample_bytes:
            return self._searched(prober, x, Answer())
        answer = Answer()
        run = partial(_run, prober, answer)
        level = self._level * prober.budget_bytes
        if len(self.scaling.per_sample_bytes) == 1:
            self._read_half_way(run, x, level)
        low, high = 0, self._last + self._unit
        size = self._on_grid(self.scaling.batch_size_at(x, level))
        for tries in range(MOST_TRIES):
            probe = run(min(max(size, self._first), high - self._unit), confirm=True)
            if probe.fits:
                low = probe.batch_size
                self._learn(x, probe)
            else:
                high = probe.batch_size
            if high - low <= max(self._unit, CLOSE * high) or high <= self._first:
                break
            size = self._next(x, level, low, high, tries)
            if size <= low:
                break
        if not low and high > self._first:
            return self._searched(prober, None, answer)
        answer.batch_size = low
        return answer

    def _next(self, x: float, level: float, low: int, high: int, failures: int) -> int:
        """Return the next size to confirm; ``low`` if that is close enough."""
        end = self.scaling.batch_size_at(x, level)
        if not low:  # the prediction was too high, and nobody knows by how much
            return self._on_grid(high * (1 - CLOSE * 2**failures))
        if high <= self._last:
            return self._on_grid((low + high) / 2)
        if end * (1 + REACH) < max(low + self._unit, low * (1 + CLOSE)):
            return low
        return max(low + self._unit, self._on_grid(end))

    def _read_half_way(self, run: Callable[..., Probe], x: float, level: float) -> None:
        """Read a second slope: the first one alone does not tell what grows with the square."""
        half = max(self._first, self._on_grid(self.scaling.batch_size_at(x, level) / 2))
        while not (probe := run(half, confirm=False)).fits and half > self._first:
            half = max(self._first, self._on_grid(half / 4))
        if probe.fits:
            self._learn(x, probe)

    def _searched(self, prober: Prober, x: float | None, answer: Answer) -> Answer:
        smallest, largest, multiple_of = self._bounds
        result = run_search(
            prober,
            min_batch_size=smallest,
            max_batch_size=largest,
            multiple_of=multiple_of,
        )
        answer.probes += result.probes
        answer.batch_size = result.batch_size
        answer.warnings = result.warnings
        model = result.memory_model
        if x is not None and model is not None and result.batch_size and model.per_sample_bytes:
            peak = model.peak_bytes(result.batch_size)
            is_end = result.status is Status.FOUND
            self._level = min(1.0, peak / prober.budget_bytes) if is_end else 1 - CLOSE
            self.scaling.learn(
                x, fixed_bytes=model.fixed_bytes, per_sample_bytes=model.per_sample_bytes
            )
        return answer

    def _learn(self, x: float, probe: Probe) -> None:
        peak = max(probe.phase_peak_bytes.values(), default=probe.peak_reserved_bytes or 0)
        if peak:
            self.scaling.learn_reading(x, probe.batch_size, peak)

    @property
    def _unit(self) -> int:
        return self._bounds[2]

    def _on_grid(self, size: float) -> int:
        on_grid = math.floor(min(size, self._last) / self._unit) * self._unit
        return max(on_grid, 0)


def _run(prober: Prober, answer: Answer, batch_size: int, *, confirm: bool) -> Probe:
    probe = prober.probe(batch_size, confirm=confirm)
    answer.probes.append(probe)
    return probe
