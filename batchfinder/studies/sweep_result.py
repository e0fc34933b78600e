"""Results of a sweep. Frozen; ``reporting`` renders them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchfinder.results.probe import Probe
from batchfinder.results.record import Plain, Study, Summarized, answer
from batchfinder.units import format_number

# How far an example's elements may be from proportional to its length, as a fraction of the
# longest example's: padding and labels add some.
_PROPORTIONAL = 0.02


@dataclass(frozen=True, repr=False)
class SweepRow(Summarized, Plain):
    """The largest batch size for one value.

    Attributes:
        values: the swept arguments, by name.
        batch_size: the largest batch size; 0 if nothing fits, or the value is impossible.
        probes: the probes that ran, in order; in an estimate, the simulated ones.
        elements: tensor elements in one example of the batch; None if unknown.
        peak_bytes: peak memory at the batch size; None if nothing fits.
        per_sample_bytes: memory that each example adds; None if unknown.
        note: why the value is impossible; "" if it is possible.
    """

    values: Mapping[str, Any]
    batch_size: int = 0
    probes: tuple[Probe, ...] = ()
    elements: float | None = None
    peak_bytes: int | None = None
    per_sample_bytes: float | None = None
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {answer(self.batch_size, self.note)}"

    @property
    def name(self) -> str:
        """The swept values as text, such as ``seq_len=512``."""
        return ", ".join(f"{name}={value}" for name, value in self.values.items())

    @property
    def confirmed_steps(self) -> int:
        """Full steps run at the batch size from a fresh allocator; 0 in an estimate."""
        at_answer = [p for p in self.probes if p.batch_size == self.batch_size and p.confirmed]
        return max((probe.steps for probe in at_answer if probe.fits), default=0)

    @property
    def length(self) -> float | None:
        """The product of the swept values, whole if they are; None if they are not all numbers."""
        values = [*self.values.values()]
        if all(isinstance(value, int | float) for value in values):
            product: float = math.prod(values)
            return product
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, with each swept value under its own name."""
        return {
            **self.values,
            "batch_size": self.batch_size,
            "confirmed_steps": self.confirmed_steps,
            "peak_bytes": self.peak_bytes,
            "per_sample_bytes": self.per_sample_bytes,
            "note": self.note,
            "probes": [probe.to_dict() for probe in self.probes],
        }


@dataclass(frozen=True, repr=False)
class Sweep(Study):
    """The largest batch size for each value of some arguments, on one device.

    Attributes:
        over: the names of the swept arguments.
        device: the name of the device.
        budget_bytes: memory that a step may use.
        is_measured: True if every size was confirmed by real training steps.
        rows: one row for each value, in the order given.
        warnings: problems that the user should act on.
        mixed_percent: percentage of the batch sizes at which one training that mixes the lengths
            was confirmed; 0 if none was; None if that was not tried.
    """

    over: tuple[str, ...]
    device: str
    budget_bytes: int
    is_measured: bool
    rows: tuple[SweepRow, ...]
    warnings: tuple[str, ...] = ()
    mixed_percent: int | None = None

    @property
    def number_of_probes(self) -> int:
        """The number of probes in the whole sweep."""
        return sum(len(row.probes) for row in self.rows)

    @property
    def max_tokens(self) -> int | None:
        """The largest number of tokens (or pixels) in a batch that is safe for all lengths.

        ``max_tokens // length`` examples fit at every length from the shortest to the longest.
        Memory per token is convex in the length, so between two lengths that ran, an example needs
        at most the interpolated memory. None if nothing fits at one of the values, or if they are
        not lengths: at least two have to show that an example's elements grow with the value.
        """
        pairs = [(self._mixed(row), row.length, row.elements) for row in self.rows]
        if len(pairs) < 2 or not all(
            size and length and elements for size, length, elements in pairs
        ):
            return None
        sizes = [(length, elements) for _, length, elements in pairs if elements and length]
        longest, most = max(sizes)
        if any(abs(n / most - length / longest) > _PROPORTIONAL for length, n in sizes):
            return None
        return int(min(size * length for size, length, _ in pairs if length))

    @property
    def fitting(self) -> Sweep:
        """The sweep of the values that can be trained on."""
        return replace(self, rows=tuple(row for row in self.rows if row.batch_size))

    @property
    def why_no_max_tokens(self) -> str:
        """The values that leave a sweep over lengths without ``max_tokens``; "" if none do."""
        if not 1 < len(self.fitting.rows) < len(self.rows) or not self.fitting.max_tokens:
            return ""
        rest = " and ".join(row.name for row in self.rows if not row.batch_size)
        return f"there is no max_tokens for all lengths, as nothing trains at {rest}"

    @property
    def buckets(self) -> dict[float, int]:
        """The batch size for each bucket, by the longest length in it.

        Empty for pairs, and unless examples of different values differ in their number of elements:
        else the values, such as depths, are no lengths.
        """
        elements = [row.elements for row in self.rows if row.batch_size]
        if len(self.over) > 1 or len({*elements}) < max(2, len(elements)):
            return {}
        sizes = {row.length: self._mixed(row) for row in self.rows if row.length}
        return {length: sizes[length] for length in sorted(sizes) if sizes[length]}

    def _mixed(self, row: SweepRow) -> int:
        """Return a row's batch size for a training that mixes the lengths."""
        if self.mixed_percent is None or not row.batch_size:
            return row.batch_size
        return share_of(row.batch_size, self.mixed_percent) if self.mixed_percent else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the sweep as plain data, ready for JSON."""
        return {
            **super().to_dict(),
            "max_tokens": self.max_tokens,
            "buckets": {format_number(length): size for length, size in self.buckets.items()},
            "number_of_probes": self.number_of_probes,
        }


def share_of(batch_size: int, percent: int) -> int:
    """Return a percentage of a batch size, but at least 1.

    Example:
        >>> share_of(99, 90), share_of(1, 90)
        (89, 1)
    """
    return max(1, batch_size * percent // 100)
