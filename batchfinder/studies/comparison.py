"""Results of a comparison. Frozen; ``reporting`` renders them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchfinder.results.accumulation import AccumulationPlan, Split
from batchfinder.results.result import SCHEMA_VERSION, BatchSizeResult
from batchfinder.studies.strategies import Strategy

STATES = ("parameters", "gradients", "optimizer states")


@dataclass(frozen=True)
class StrategyRow:
    """What one strategy gives.

    Attributes:
        strategy: its levers.
        result: the search, simulated or measured; None if the strategy is impossible.
        terms: bytes of each term of the memory equation at the largest batch size; empty where
            only the device was asked.
        peak_bytes: peak memory at the largest batch size.
        model_state_bytes: parameters, gradients and optimizer states.
        blocks: what is recomputed in the backward pass; "" without checkpointing.
        note: why the strategy is impossible, or what to know about it; "" if nothing.
        world_size: ranks that train together.
        plan: how the global batch size is reached; None if none was asked for.
        split_seconds: seconds of one optimizer step at the global batch size; None if unmeasured.
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
    split_seconds: float | None = None

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
        """The split that the global batch size is reached with: exact, else the nearest."""
        return nearest_split(self.plan) if self.plan else None

    @property
    def samples_per_second(self) -> float | None:
        """Examples a second of all ranks at the largest batch size; None if unmeasured."""
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


@dataclass(frozen=True)
class Comparison:
    """Strategies side by side, on one device.

    Attributes:
        device: its name.
        budget_bytes: memory that a step may use.
        is_measured: whether the rows come from real training steps.
        rows: one for each strategy; the first changes nothing.
        global_batch_size: examples of an optimizer step that were asked for; None if none were.
        base: what the first row trains with, such as ``"bf16, AdamW"``.
        warnings: what the user should know of all rows.
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
        """The first of the rows with the largest batch on a device; None if nothing fits."""
        rows = [row for row in self.rows if row.batch_size]
        return max(rows, key=lambda row: row.batch_size, default=None)

    @property
    def fastest(self) -> StrategyRow | None:
        """The row that trains fastest: at the global batch size, else at its largest batch size.

        None if nothing was measured.
        """
        if self.global_batch_size is not None:
            timed = [row for row in self.rows if row.split_seconds and row.split]
            return min(timed, key=_seconds_of_an_example, default=None)
        timed = [row for row in self.rows if row.samples_per_second]
        return max(timed, key=lambda row: row.samples_per_second or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data, ready for JSON."""
        largest, fastest = self.largest, self.fastest
        return {
            "schema_version": SCHEMA_VERSION,
            "device": self.device,
            "budget_bytes": self.budget_bytes,
            "is_measured": self.is_measured,
            "global_batch_size": self.global_batch_size,
            "base": self.base,
            "largest": largest.strategy.name if largest else None,
            "fastest": fastest.strategy.name if fastest else None,
            "rows": [row.to_dict() for row in self.rows],
            "warnings": [*self.warnings],
        }


def nearest_split(plan: AccumulationPlan) -> Split:
    """Return the exact split of a plan that is not wasteful, else the nearest one."""
    near = [split for split in (plan.below, plan.above) if split]
    if plan.exact and not near:
        return plan.exact
    return min(near, key=lambda split: abs(split.global_batch_size - plan.requested))


def seconds_of_step(result: BatchSizeResult, batch_size: int) -> float | None:
    """Return how long a step takes at a batch size, by the steps of a search; None if unknown.

    Between two sizes that ran, time is interpolated; below the smallest it is taken as constant.

    """
    readings: dict[int, float] = {}
    for probe in result.probes:
        if probe.fits and probe.step_seconds is not None:
            known = readings.get(probe.batch_size, probe.step_seconds)
            readings[probe.batch_size] = min(known, probe.step_seconds)
    return _interpolated(sorted(readings.items()), batch_size)


def _interpolated(points: Sequence[tuple[int, float]], at: int) -> float | None:
    """Return the value at a place between points.

    Example:
        >>> _interpolated([(2, 1.0), (4, 1.5), (8, 2.5)], 6)
        2.0
    """
    below = [point for point in points if point[0] <= at]
    above = [point for point in points if point[0] >= at]
    if not below or not above:
        nearest = (below or above)[-1 if below else 0] if points else None
        return nearest[1] if nearest else None
    (low, low_value), (high, high_value) = below[-1], above[0]
    share = (at - low) / (high - low) if high > low else 0.0
    return low_value + share * (high_value - low_value)


def _seconds_of_an_example(row: StrategyRow) -> float:
    assert row.split is not None
    assert row.split_seconds is not None
    return row.split_seconds / row.split.global_batch_size
