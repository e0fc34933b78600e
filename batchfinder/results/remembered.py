"""The answer of an earlier search, which one confirmation proves or refutes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchfinder.results.probe import Probe
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.units import format_bytes

# How much the peak of the confirmation may differ from the remembered one, as a fraction. If
# readings repeat, a larger difference shows that the training step has changed in a way that the
# key does not cover, such as the content of a file that only the step reads. On the CPU, readings
# of the same step differ by several percent from run to run.
SAME_PEAK, SAME_PEAK_UNREPEATABLE = 0.01, 0.1

# With a budget below this share of the earlier one, the answer is not worth a confirmation. With a
# larger budget, the failure above the answer proves nothing. The upper shares allow for the
# difference that other processes make.
LEAST_BUDGET, MOST_BUDGET, MOST_BUDGET_UNREPEATABLE = 0.95, 1.001, 1.05


@dataclass(frozen=True)
class Remembered:
    """An answer of an earlier search, with the evidence for it.

    Attributes:
        batch_size: the answer.
        status: FOUND or CAPPED.
        saved: when it was found, in ISO 8601.
        budget_bytes: memory that a step could use.
        probes: the probes of that search.
        failure: the smallest size above the answer that failed; None if none was tried.
    """

    batch_size: int
    status: Status
    saved: str
    budget_bytes: int
    probes: tuple[Probe, ...]
    failure: Probe | None

    @classmethod
    def of(cls, result: Mapping[str, Any], saved: str) -> Remembered:
        """Read an answer from :meth:`BatchSizeResult.to_dict`.

        Raises:
            KeyError, ValueError, TypeError: the data has no such answer.
        """
        probes = tuple(Probe.from_dict(probe) for probe in result["probes"])
        failure = result["next_failure"]
        if failure is not None:
            size = failure["batch_size"]
            failure = next(p for p in probes if p.batch_size == size and not p.fits)
        budget_bytes, batch_size = int(result["budget_bytes"]), int(result["batch_size"])
        return cls(batch_size, Status(result["status"]), saved, budget_bytes, probes, failure)

    @staticmethod
    def is_worth_it(result: BatchSizeResult) -> bool:
        """Return True if a result can be remembered: one confirmation must be able to prove it."""
        return result.status in (Status.FOUND, Status.CAPPED) and result.confirmed_steps > 0

    def suits(self, budget_bytes: int, *, is_repeatable: bool) -> bool:
        """Return True if the answer is worth a confirmation with this budget."""
        most = MOST_BUDGET if is_repeatable else MOST_BUDGET_UNREPEATABLE
        if self.status is Status.CAPPED:
            most = math.inf
        return LEAST_BUDGET <= budget_bytes / self.budget_bytes <= most

    def is_proved_by(self, probe: Probe, *, is_repeatable: bool) -> bool:
        """Return True if a confirmation of the batch size proves the answer again."""
        then = self._peak_bytes()
        tolerance = SAME_PEAK if is_repeatable else SAME_PEAK_UNREPEATABLE
        is_same = abs(probe.tensor_bytes - then) <= tolerance * then
        return probe.fits and is_same

    def note_of_failure(self, probe: Probe) -> str:
        """Return a note that a confirmation of the batch size did not prove the answer."""
        outcome = "failed"
        if probe.fits:
            peaks = [format_bytes(peak) for peak in (probe.tensor_bytes, self._peak_bytes())]
            outcome = "used {} instead of {}".format(*peaks)
        return (
            f"the answer of {self.saved} was {self.batch_size}, but its confirmation {outcome}, so "
            "it was searched again"
        )

    def _peak_bytes(self) -> int:
        peaks = (p.tensor_bytes for p in self.probes if p.batch_size == self.batch_size)
        return max(peaks, default=0)
