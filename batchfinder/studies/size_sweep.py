"""A search for the largest batch size at many example sizes, with few probes.

A whole search runs at the largest examples. It and a few readings predict the memory at other
example sizes (:mod:`~batchfinder.studies.scaling`). The prediction gives one batch size for each,
which is confirmed. A confirmation that fails, or leaves much memory, corrects the prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from batchfinder.results.probe import Probe
from batchfinder.results.result import Status
from batchfinder.search.bounds import Bounds
from batchfinder.search.prober import Prober
from batchfinder.search.run import run_search
from batchfinder.simulation.recordings.guess import head_start_of
from batchfinder.studies.scaling import Scaling

# How far an answer may be below a failure or the prediction, as a fraction of the size. Searches
# on a device that is not repeatable have the same precision (search/bracket.py).
CLOSE = 0.05

# How much too low a prediction may be, as a fraction. Predictions are a few percent off.
REACH = 0.03

# If this many confirmations fail at one example size, the sizes do not predict each other, and this
# one gets a whole search.
MOST_TRIES = 5


@dataclass
class Answer:
    """The answer at one example size.

    Attributes:
        batch_size: the largest size that was confirmed; 0 if none was.
        probes: the probes that ran.
        warnings: problems that the user should act on.
    """

    batch_size: int = 0
    probes: list[Probe] = field(default_factory=list)
    warnings: tuple[str, ...] = ()


class SizeSweep:
    """Finds the largest batch size at one example size after another.

    Attributes:
        scaling: the memory by batch size and example size, as far as it is known.
    """

    def __init__(self, bounds: Bounds, confirm_steps: int = 3) -> None:
        self.scaling = Scaling()
        self._bounds = bounds
        self._confirm_steps = confirm_steps
        # The highest fraction of the budget that an answer used. The rest is lost to gaps.
        self._level = 0.0

    def find(
        self,
        prober: Prober,
        x: float | None,
        on_probing: Callable[[int, bool], None] = lambda *_: None,
    ) -> Answer:
        """Find the largest batch size with a prober that trains on examples of size ``x``.

        If that is None, as it is not a number, a whole search runs. ``on_probing`` is called with
        the batch size, and whether it is a confirmation, as a probe begins.
        """
        if x is None or not self.scaling.per_sample_bytes:
            return self._searched(prober, x, Answer(), on_probing)
        answer = Answer()
        head_start = head_start_of(prober, self._confirm_steps)

        def run(batch_size: int, *, confirm: bool) -> Probe:
            on_probing(batch_size, confirm)
            probe = head_start.judged(prober.probe(batch_size, confirm=confirm))
            answer.probes.append(probe)
            return probe

        level = self._level * prober.budget_bytes
        if len(self.scaling.per_sample_bytes) == 1:
            # Other example sizes may leave smaller gaps than the first.
            level = max(self._level, 1 - CLOSE) * prober.budget_bytes
            self._read_half_way(run, x, level)
        bounds = self._bounds
        low, high = 0, bounds.after(bounds.last)
        size = self._aim(x, level)
        for tries in itertools.count():
            probe = run(min(max(size, bounds.first), bounds.before(high)), confirm=True)
            if probe.fits:
                low = probe.batch_size
                self._learn(x, probe)
                self._level = max(self._level, (probe.peak_bytes or 0) / prober.budget_bytes)
            else:
                high = probe.batch_size
            is_close = high <= bounds.after(low) or high - low <= CLOSE * high
            is_hopeless = not low and tries + 1 == MOST_TRIES
            if is_close or is_hopeless or high <= bounds.first:
                break
            size = self._next(x, level, low, high, tries)
            if size <= low:
                break
        if not low and high > bounds.first:
            return self._searched(prober, None, answer, on_probing)
        answer.batch_size = low
        return answer

    def _next(self, x: float, level: float, low: int, high: int, failures: int) -> int:
        """Return the next size to confirm; ``low`` if that is close enough."""
        after, before = self._bounds.after, self._bounds.before
        if not low:  # the prediction was too high by an unknown amount
            return min(before(high), high - self._on_grid(high * CLOSE * 2**failures))
        if high <= self._bounds.last:
            return self._on_grid((low + high) / 2)
        end = self.scaling.batch_size_at(x, level)
        is_close = after(low) > end * (1 + REACH) / (1 + CLOSE)
        return low if is_close else max(after(low), self._aim(x, level))

    def _aim(self, x: float, level: float) -> int:
        """Return the size to try, between the prediction and the smallest size close enough to it.

        The prediction itself would fail every other time.
        """
        end = self.scaling.batch_size_at(x, level)
        return self._on_grid((end + end * (1 + REACH) / (1 + CLOSE)) / 2)

    def _read_half_way(self, run: Callable[..., Probe], x: float, level: float) -> None:
        """Read a second slope, because one slope does not show what grows with the square."""
        first = self._bounds.first
        half = max(first, self._on_grid(self.scaling.batch_size_at(x, level) / 2))
        while not (probe := run(half, confirm=False)).fits and half > first:
            half = max(first, self._on_grid(half / 4))
        if probe.fits:
            self._learn(x, probe)

    def _searched(
        self,
        prober: Prober,
        x: float | None,
        answer: Answer,
        on_probing: Callable[[int, bool], None],
    ) -> Answer:
        head_start = head_start_of(prober, self._confirm_steps)
        result = run_search(prober, self._bounds, on_probing=on_probing, head_start=head_start)
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
        if probe.peak_bytes:
            self.scaling.learn_reading(x, probe.batch_size, probe.peak_bytes)

    def _on_grid(self, size: float) -> int:
        return max(0, self._bounds.at_most(min(size, self._bounds.last)))
