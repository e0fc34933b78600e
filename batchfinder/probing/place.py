"""Where sizes are tried: the device, and what a step may use of it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Place:
    """A device as one search sees it, read once by the process that holds the device.

    Attributes:
        device: the device's name for people, such as ``"cuda:0 NVIDIA H200"``.
        capacity_bytes: the device's memory.
        used_by_others_bytes: memory that other processes hold.
        budget_bytes: the memory that a step may use.
        is_repeatable: whether a size that ran one step will run many, in any process.
        versions: the versions that the answer depends on.
        limit_warning: a text for the user if the budget cannot be enforced; None if it can.
        facts: whatever ranks that train together must have in common, in words.
    """

    device: str
    capacity_bytes: int
    used_by_others_bytes: int
    budget_bytes: int
    is_repeatable: bool
    versions: Mapping[str, str]
    limit_warning: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The place as plain data, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Place:
        """The inverse of :meth:`to_dict`."""
        return cls(**data)


class AtPlace:
    """A prober's attributes that its place has; see :class:`~batchfinder.search.prober.Prober`."""

    place: Place

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
