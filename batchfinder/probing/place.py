"""The device of a search, and the memory that a step may use on it. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


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
        confirms_afresh: True if each confirmation needs a new process, because batches of varying
            length fit at larger sizes in a process that has trained before. With TRL's SFTTrainer
            it was 785 there and 727 in new ones; training died at 785 and at 800, and ran at 760
            (set-up sft-24 of scripts/benchmarks/parts/setup_list.py).
    """

    device: str
    capacity_bytes: int
    used_by_others_bytes: int
    budget_bytes: int
    is_repeatable: bool
    versions: Mapping[str, str]
    limit_warning: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    confirms_afresh: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the place as plain data, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Place:
        """Return the place from the data of :meth:`to_dict`."""
        return cls(**data)


def may_expand(device: str) -> bool:
    """Return True if a device's allocator has expandable segments, and they are off.

    Args:
        device: the device's name, such as ``"cuda:0 NVIDIA H200"``.
    """
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")
    is_on = "expandable_segments:True" in settings.replace(" ", "")
    return device.startswith("cuda") and not is_on


class AtPlace:
    """The attributes of a :class:`~batchfinder.search.prober.Prober` that its place provides."""

    place: Place
    seconds_by_part: dict[str, float]

    @property
    def device(self) -> str:
        return self.place.device

    @property
    def capacity_bytes(self) -> int:
        return self.place.capacity_bytes

    @property
    def used_by_others_bytes(self) -> int:
        return self.place.used_by_others_bytes

    @property
    def budget_bytes(self) -> int:
        return self.place.budget_bytes

    @property
    def is_repeatable(self) -> bool:
        return self.place.is_repeatable

    @property
    def versions(self) -> Mapping[str, str]:
        return self.place.versions

    @property
    def may_expand(self) -> bool:
        return may_expand(self.place.device)
