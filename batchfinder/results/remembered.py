"""The answer of an earlier search, which one confirmation proves or refutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchfinder.results.memory_model import MemoryModel
from batchfinder.results.probe import Probe
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.units import format_bytes

# How much the peak of the confirmation may differ from the remembered one, as a fraction. If
# readings repeat, a larger difference shows that the training step has changed in a way that the
# key does not cover, such as the content of a file that only the step reads. On the CPU, readings
# of the same step differ by several percent from run to run.
SAME_PEAK, SAME_PEAK_UNREPEATABLE = 0.01, 0.1

# With a budget below this share of the earlier one, the answer is not worth a confirmation. With a
# larger budget, the failure above the answer proves nothing. The upper share allows for the
# difference that other processes make.
LEAST_BUDGET, MOST_BUDGET = 0.95, 1.05

# Where readings repeat, the budget fits up to this share more or fewer examples. Answers differ by
# as much where the allocator is fragmented (search/bracket.py), and the free memory of a desktop's
# GPU always does.
SAME_EXAMPLES = 0.01


@dataclass(frozen=True)
class Remembered:
    """An answer of an earlier search, with the evidence for it.

    Attributes:
        batch_size: the answer.
        status: FOUND or CAPPED.
        saved: when it was found, in ISO 8601.
        budget_bytes: memory that a step could use, as far as was known before the first one.
        probes: the probes of that search.
        failure: the smallest size above the answer that failed; None if none was tried.
        memory_model: the lines through those probes; None if there are none.
    """

    batch_size: int
    status: Status
    saved: str
    budget_bytes: int
    probes: tuple[Probe, ...]
    failure: Probe | None
    memory_model: MemoryModel | None

    @classmethod
    def of(
        cls, result: Mapping[str, Any], saved: str, budget_bytes: int | None = None
    ) -> Remembered:
        """Read an answer from :meth:`BatchSizeResult.to_dict` and its budget before any step.

        Raises:
            KeyError, ValueError, TypeError: the data has no such answer.
        """
        probes = tuple(Probe.from_dict(probe) for probe in result["probes"])
        failure = result["next_failure"]
        if failure is not None:
            size = failure["batch_size"]
            failure = next(p for p in probes if p.batch_size == size and not p.fits)
        budget_bytes = budget_bytes or int(result["budget_bytes"])
        model = result["memory_model"] and MemoryModel.from_dict(result["memory_model"])
        status, batch_size = Status(result["status"]), int(result["batch_size"])
        return cls(batch_size, status, saved, budget_bytes, probes, failure, model)

    @staticmethod
    def is_worth_it(result: BatchSizeResult) -> bool:
        """Return True if a result can be remembered: one confirmation must be able to prove it."""
        return result.status in (Status.FOUND, Status.CAPPED) and result.confirmed_steps > 0

    def suits(self, budget_bytes: int, *, is_repeatable: bool) -> bool:
        """Return True if the answer is worth a confirmation with this budget."""
        share = budget_bytes / self.budget_bytes
        if self.status is Status.CAPPED:
            return share >= LEAST_BUDGET
        if is_repeatable and self.memory_model:
            sizes = map(self.memory_model.max_batch_size, (budget_bytes, self.budget_bytes))
            now, then = (size or 0 for size in sizes)
            if abs(now - then) > SAME_EXAMPLES * then:
                return False
        return LEAST_BUDGET <= share <= MOST_BUDGET

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
