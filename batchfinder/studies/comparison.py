"""Results of a comparison. Frozen; ``reporting`` renders them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchfinder.results.accumulation import AccumulationPlan, Split
from batchfinder.results.record import Plain, Study, Summarized, answer
from batchfinder.results.result import BatchSizeResult
from batchfinder.results.throughput import interpolated
from batchfinder.studies.strategies import Strategy


@dataclass(frozen=True, repr=False)
class StrategyRow(Summarized, Plain):
    """The result of one strategy.

    Attributes:
        strategy: the strategy with its levers.
        result: the search, simulated or measured; None if the strategy is impossible.
        terms: bytes of each term of the memory equation at the largest batch size; empty if the
            row was measured.
        peak_bytes: peak memory at the largest batch size; of an estimate, at the smallest size if
            nothing fits.
        model_state_bytes: most bytes of parameters, of gradients and of optimizer states, added up.
        blocks: the modules recomputed in the backward pass, as text; "" without checkpointing.
        note: why the strategy is impossible, or a remark on it; "" if there is none.
        world_size: the number of ranks that train together.
        plan: how to reach the global batch size; None if none was requested.
    """

    strategy: Strategy
    result: BatchSizeResult | None = None
    terms: Mapping[str, int] = dataclasses.field(default_factory=dict)
    peak_bytes: int | None = None
    model_state_bytes: int | None = None
    blocks: str = ""
    note: str = ""
    world_size: int = 1
    plan: AccumulationPlan | None = None

    def __str__(self) -> str:
        return f"{self.strategy.name}: {answer(self.batch_size, self.note)}"

    @property
    def batch_size(self) -> int:
        """The largest batch size; 0 if nothing fits or the strategy is impossible."""
        return self.result.batch_size if self.result else 0

    @property
    def per_sample_bytes(self) -> float | None:
        """Memory that each example adds; None if unknown."""
        model = self.result.memory_model if self.result else None
        return model.per_sample_bytes if model else None

    @property
    def split(self) -> Split | None:
        """The split to reach the global batch size: the exact one, unless it is wasteful."""
        return (self.plan.nearest or self.plan.exact) if self.plan else None

    @property
    def split_seconds(self) -> float | None:
        """Seconds of one optimizer step at the global batch size; None if unmeasured."""
        if self.result is None or self.split is None:
            return None
        one = seconds_of_step(self.result, self.split.batch_size)
        return one and one * self.split.gradient_accumulation_steps

    @property
    def samples_per_second(self) -> float | None:
        """Examples per second over all ranks, at the largest batch size; None if unmeasured."""
        seconds = seconds_of_step(self.result, self.batch_size) if self.result else None
        return self.batch_size * self.world_size / seconds if seconds else None

    @property
    def seconds_per_1000_samples(self) -> float | None:
        """Seconds for 1,000 examples at the largest batch size; None if unmeasured."""
        rate = self.samples_per_second
        return 1000 / rate if rate else None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, ready for JSON."""
        return {
            "strategy": self.strategy.name,
            "levers": dataclasses.asdict(self.strategy),
            "batch_size": self.batch_size,
            "peak_bytes": self.peak_bytes,
            "model_state_bytes": self.model_state_bytes,
            "per_sample_bytes": self.per_sample_bytes,
            "terms": dict(self.terms),
            "blocks": self.blocks,
            "note": self.note,
            "world_size": self.world_size,
            "samples_per_second": self.samples_per_second,
            "seconds_per_1000_samples": self.seconds_per_1000_samples,
            "split": dataclasses.asdict(self.split) if self.split else None,
            "global_step_seconds": self.split_seconds,
            "result": self.result.to_dict() if self.result else None,
        }


@dataclass(frozen=True, repr=False)
class Comparison(Study):
    """Strategies side by side, on one device.

    Attributes:
        device: the name of the device.
        budget_bytes: memory that a step may use.
        is_measured: True if the rows come from real training steps.
        rows: one row for each strategy; the first changes nothing.
        global_batch_size: the requested examples of an optimizer step; None if not requested.
        base: precision and optimizer of the first row, such as ``"bf16, AdamW"``.
        warnings: problems of all rows that the user should act on.
    """

    device: str
    budget_bytes: int
    is_measured: bool
    rows: tuple[StrategyRow, ...]
    global_batch_size: int | None = None
    base: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def largest(self) -> StrategyRow | None:
        """The row with the largest batch size; None if nothing fits.

        Of equals, the one with the fewest bytes of model states: it leaves the most memory.
        """
        rows = [row for row in self.rows if row.batch_size]
        return max(
            rows,
            key=lambda row: (row.batch_size, -(row.model_state_bytes or math.inf)),
            default=None,
        )

    @property
    def fastest(self) -> StrategyRow | None:
        """The fastest row: at the global batch size, or else each at its largest batch size.

        None if nothing was measured.
        """
        return max(filter(self._speed, self.rows), key=self._speed, default=None)

    def _speed(self, row: StrategyRow) -> float:
        """Return the examples per second that count for a row; 0 if unmeasured."""
        if self.global_batch_size is None:
            return row.samples_per_second or 0.0
        if row.split is None or not row.split_seconds:
            return 0.0
        return row.split.global_batch_size / row.split_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data, ready for JSON."""
        largest, fastest = self.largest, self.fastest
        return {
            **super().to_dict(),
            "largest": largest.strategy.name if largest else None,
            "fastest": fastest.strategy.name if fastest else None,
        }


def seconds_of_step(result: BatchSizeResult, batch_size: int) -> float | None:
    """Return the seconds for one batch of a size, from a search; None if unknown.

    A probe of a single step counts only if there are no others: it allocates memory, and may
    compile. Between two sizes that ran, the time is interpolated. Beyond them, it is the nearest
    size's.
    """
    timed = [probe for probe in result.probes if probe.fits and probe.batch_seconds]
    readings: dict[int, list[float]] = {}
    for probe in [probe for probe in timed if len(probe.steps_seconds) > 1] or timed:
        readings.setdefault(probe.batch_size, []).extend(probe.batch_seconds)
    medians = [(size, statistics.median(of_size)) for size, of_size in sorted(readings.items())]
    return interpolated(medians, batch_size) if medians else None
