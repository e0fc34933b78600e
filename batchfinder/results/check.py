"""The answer of ``batchfinder check``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchfinder.results.record import Record
from batchfinder.results.version import SCHEMA_VERSION
from batchfinder.units import format_bytes

WIDE = " " * 5
"""The gap between the parts of a line."""


@dataclass(frozen=True)
class Check(Record):
    """The answer to the question whether a batch size trains.

    Attributes:
        batch_size: examples per forward/backward pass.
        trains: True if it trains within the limit.
        device: the device's name.
        limit_bytes: memory that a step may use: the budget, or ``--max-memory`` if that is less.
        peak_bytes: the peak memory; None if it was not read.
        steps: full steps that ran; 0 in an estimate.
        reason: why it does not train; "" if it does.
    """

    batch_size: int
    trains: bool
    device: str
    limit_bytes: int
    peak_bytes: int | None
    steps: int
    reason: str

    @property
    def margin_bytes(self) -> int | None:
        """The bytes that the peak leaves of the limit; None if there is no peak, or no room."""
        return self.limit_bytes - self.peak_bytes if self.trains and self.peak_bytes else None

    def __str__(self) -> str:
        if not self.trains:
            return (
                f"Batch size {self.batch_size} does not train on {self.device}: {self.reason}. "
                f"A step may use {format_bytes(self.limit_bytes)}"
            )
        line = f"Batch size {self.batch_size} trains on {self.device}"
        if self.margin_bytes is not None and self.peak_bytes is not None:
            share = self.margin_bytes / self.limit_bytes
            peak, limit = format_bytes(self.peak_bytes), format_bytes(self.limit_bytes)
            line += f"{WIDE}peak {peak} of {limit}"
            line += f"{WIDE}margin {format_bytes(self.margin_bytes)} ({share:.1%})"
        return f"{line}{WIDE}{f'{self.steps} steps' if self.steps else 'estimated'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data, ready for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            **super().to_dict(),
            "margin_bytes": self.margin_bytes,
        }
