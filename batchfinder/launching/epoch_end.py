"""What a launch showed after its steps: the validation at the end of an epoch, and a step after it.

The hook ends the epoch early, see ``launching/hook/epoch_end.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from batchfinder.results.probe import IN_VALIDATION
from batchfinder.units import format_bytes

# Steps without a validation after which none is expected at the end of an epoch.
MOST_STEPS = 3

# The first batch of a validation allocates what it needs once. How much each batch keeps is read
# after this many: what the second and the third added.
SETTLED = 3

# What the batches of a validation have left is joined to one tensor if this many times as much was
# needed for a moment: twice, but a script may keep a little that it does not join.
JOINED = 1.9

UNSEEN = (
    "the script seems to have a validation, but none was seen in the launches, so the answer does "
    "not include it. Try the script's own options to validate sooner, or with smaller batches"
)

ANEW = (
    "the script makes another optimizer later, for a next phase or fold. Of that training only the "
    "first step was seen, so it may need more memory. Try batchfinder run with that training alone"
)


class _Growth(NamedTuple):
    """What the batches of a validation leave on a device."""

    kept_bytes: int  # by each
    batches: float
    needed_bytes: int  # after the last


@dataclass
class EpochEnd:
    """The end of an epoch, as all processes of a launch report it.

    Attributes:
        has_begun: True once the driver has asked for it.
        has_validated: True once a model has validated after its first step.
        validation_peak_bytes: the most bytes that tensors held in a validation; 0 if none was read.
        allocated_bytes: the same, in the validation or a step after it.
        reserved_bytes: the most bytes that the allocator held then.
        trains_anew: True if the script made another optimizer then.
    """

    has_begun: bool = False
    has_validated: bool = False
    validation_peak_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    trains_anew: bool = False
    _steps: dict[int, int] = field(default_factory=dict)
    _would_write: bool = False
    _batches: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # of a validation
    _is_unsure: bool = False  # a loader gave a batch, and neither a pass nor a step followed
    _unused_loaders: int = 0
    _early_peak_bytes: int = 0  # of the model, evaluated before its first step
    _held_bytes: int = 0  # between two steps
    _growths: list[_Growth] = field(default_factory=list)

    def add(self, report: dict[str, Any]) -> None:
        """Note a report of the hook."""
        event, pid = report["event"], report["pid"]
        self._unused_loaders = report.get("unused_loaders", self._unused_loaders)
        if self.has_begun:
            self.allocated_bytes = max(self.allocated_bytes, report.get("allocated", 0))
            self.reserved_bytes = max(self.reserved_bytes, report.get("reserved", 0))
        if event == "validated":
            peak = report["allocated"]
            self.has_validated |= report["has_trained"]
            if report["is_after"]:
                self.validation_peak_bytes = max(self.validation_peak_bytes, peak)
            elif not report["has_trained"]:
                self._early_peak_bytes = max(self._early_peak_bytes, peak)
            self._steps.pop(pid, None)
            self._is_unsure = False
        elif event == "step_after":
            self._is_unsure = False
            self._steps[pid] = self._steps.get(pid, 0) + 1
            self._held_bytes = max(self._held_bytes, report["held"])
        elif event == "batch_after":
            self._is_unsure = True
            seen = self._batches.setdefault(pid, [])
            seen[report["given"] :] = [report]
            if len(seen) > SETTLED and report["batches"]:
                self._growths += _growth(seen)
        elif event == "trains_anew":
            self.trains_anew = True
        elif event == "would_write":
            self._would_write = True

    def is_over(self, processes: int) -> bool:
        """Return True once each process has trained on, or one is about to write a file."""
        needed = 1 if self.has_validated else MOST_STEPS
        trained = [pid for pid, steps in self._steps.items() if steps >= needed]
        return self._would_write or len(trained) >= processes

    def place_of(self, failure: dict[str, Any]) -> str:
        """Return how a note about running out of memory begins; "" for a training step."""
        return IN_VALIDATION if self.has_begun and not failure["has_gradients"] else ""

    @property
    def has_validated_first(self) -> bool:
        """True if a model was evaluated before its first step."""
        return self._early_peak_bytes > 0

    def remark(self, budget_bytes: int, error: str) -> str:
        """Return what the user should know; "" if there is nothing.

        ``error`` is what ended the script; "" if nothing did.
        """
        if error and self.has_begun and "StopIteration" not in error:  # as the hook raises itself
            return (
                "after its steps, in an epoch that batchfinder ended early, the script failed: "
                f"{error}. What follows was not seen. Check that a full epoch does not fail so"
            )
        if not self.has_validated:
            # The parameters count twice here, so what fits does so with the optimizer's states too.
            is_close = self._early_peak_bytes + self._held_bytes > budget_bytes
            return UNSEEN if self._unused_loaders or self._is_unsure or is_close else ""
        for growth in self._growths:
            if growth.needed_bytes > budget_bytes:
                return (
                    f"each batch of the validation leaves {format_bytes(growth.kept_bytes)} more "
                    f"on the device, too much for all {math.ceil(growth.batches)}. "
                    "Try to move what it keeps to the CPU (eval_accumulation_steps of Transformers)"
                )
        return ""


def _growth(seen: list[dict[str, Any]]) -> list[_Growth]:
    """Return what the batches of a validation leave, if each leaves something."""
    before, now = seen[0]["held"], seen[-1]
    held = [report["held"] for report in seen[1:]]
    kept = min(later - earlier for earlier, later in pairwise(held))
    # Accelerate's loaders draw a batch ahead of the one that the model has passed.
    passed = sum(later["passes"] > earlier["passes"] for earlier, later in pairwise(seen))
    left = now["batches"] - passed
    if kept <= 0 or left <= 0:
        return []
    needed = held[-1] + kept * left
    # Joined to one tensor after each pass, as Trainers do, all of it is there twice for a moment.
    if passed and now["allocated"] - before > JOINED * kept * passed:
        needed = max(needed, before + 2 * kept * now["batches"])
    return [_Growth(kept, now["batches"], int(needed))]
