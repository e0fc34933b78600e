"""The device of a search, and the memory that a step may use on it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from batchfinder.probing.devices.allocator.caching import AllocatorSettings
from batchfinder.probing.notes import Notes
from batchfinder.probing.steadiness import CACHING_VARIED_STEPS, VARIED_STEPS
from batchfinder.results.result import BatchSizeResult
from batchfinder.search.bracket import DIFFERING_RESOLUTION
from batchfinder.search.plan import VARIED_ROOM, Prices
from batchfinder.search.prober import Prober, Recording

# Prices of a search whose batches vary in length, on a caching allocator. A confirmation that fits
# runs CACHING_VARIED_STEPS; one that fails does so in step 1 to 3. Fragmentation costs about 1 %
# besides VARIED_ROOM. How many bytes a size needs depends on the order of
# its batches, so the final bracket is as wide as where steps differ.
VARIED_PRICES = Prices(
    confirm=CACHING_VARIED_STEPS,
    resolution=DIFFERING_RESOLUTION,
    room=VARIED_ROOM + 0.01,
    probes_prove=False,
)


@dataclass(frozen=True)
class Place:
    """A device as one search sees it. The process that uses the device reads it once.

    Attributes:
        device: the device's name shown to people, such as ``"cuda:0 NVIDIA H200"``.
        capacity_bytes: the total memory of the device.
        used_by_others_bytes: memory that other processes use.
        budget_bytes: memory that a step may use.
        is_repeatable: True if a size that ran one step will run many, in any process.
        versions: versions of batchfinder, Python, PyTorch and so on that the answer depends on.
        limit_warning: a warning that the budget cannot be enforced; None if it can.
        facts: facts that ranks training together must have in common, by their name in messages.
        batches_vary: True if the batches of a training differ in shape from step to step.
        sample_size: the batch size of the user's sample; None if there is no sample.
    """

    device: str
    capacity_bytes: int
    used_by_others_bytes: int
    budget_bytes: int
    is_repeatable: bool
    versions: Mapping[str, str]
    limit_warning: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    batches_vary: bool = False
    sample_size: int | None = None


def lowered(budget_bytes: int, grown_bytes: int, headroom: float) -> int:
    """Return the budget once steps have used so much more outside the allocator than before.

    Libraries, kernels and groups of ranks use memory there from the first step on.
    """
    return max(1, math.floor(budget_bytes - max(0, grown_bytes) * (1 - headroom)))


def may_expand(device: str) -> bool:
    """Return True if a device, by its name, has expandable segments, and they are off."""
    return device.startswith("cuda") and not AllocatorSettings.of_this_process().expandable_segments


def prices_for(prober: Prober) -> Prices | None:
    """Return the prices of a prober's moves if its batches vary in length; else None."""
    if not batches_vary(prober):
        return None
    return VARIED_PRICES if prober.is_repeatable else Prices(VARIED_STEPS, room=VARIED_ROOM)


def batches_vary(prober: Prober) -> bool:
    """Return True if a prober trains on batches of another shape in each step."""
    return isinstance(prober, AtPlace) and prober.place.batches_vary


class AtPlace:
    """The attributes of a :class:`~batchfinder.search.prober.Prober` that its place provides."""

    place: Place
    device: str
    capacity_bytes: int
    used_by_others_bytes: int
    budget_bytes: int
    is_repeatable: bool
    versions: Mapping[str, str]
    may_expand: bool
    seconds_by_part: dict[str, float]
    recordings: dict[int, Recording] | None = None
    notes: Notes

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.notes.texts

    def settle(self, place: Place) -> None:
        """Take over the attributes of a place."""
        vars(self).update(vars(place), place=place, may_expand=may_expand(place.device))

    def lower_budget(self, budget_bytes: int) -> None:
        """Let later probes use this many bytes."""
        self.settle(replace(self.place, budget_bytes=budget_bytes))

    def agreed(self, result: BatchSizeResult) -> BatchSizeResult:
        """Return the result that every process of the search returns."""
        return result
