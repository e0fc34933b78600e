"""What tries sizes for a search: a worker, wherever it runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from batchfinder.probing.attempt import Attempt
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.place import Place


@dataclass(frozen=True)
class EstimateOrder:
    """An order to estimate the answer.

    Attributes:
        function: ``module:function``; called with setup, options, the device's name, the budget
            and the bounds. It returns a size or None, and texts for the user.
        bounds: the smallest size, the largest or None, and what each size is a multiple of.
    """

    function: str
    bounds: tuple[int, int | None, int]


@dataclass(frozen=True)
class Order:
    """What a worker needs to start.

    Attributes:
        options: of the search.
        group: the process group to join, as plain data; None: none.
        estimate: the estimate to make beside the steps; None: none.
    """

    options: ProbeOptions
    group: Mapping[str, Any] | None = None
    estimate: EstimateOrder | None = None

    def to_dict(self) -> dict[str, Any]:
        """The order as plain data, ready for JSON."""
        return {**asdict(self), "options": self.options.to_dict()}


class Worker(Protocol):
    """Tries one size after the other.

    Attributes:
        is_replaceable: whether a second start gives a fresh process, with nothing left of before.
    """

    @property
    def is_replaceable(self) -> bool: ...

    def start(self, order: Order) -> Place:
        """Get ready for the first size; once started, be as good as new again.

        Raises:
            BatchFinderError, UserCodeError: the setup cannot be loaded, or not be used.
        """
        ...

    def attempt(self, batch_size: int, confirm: bool) -> Attempt:
        """Try a size.

        Raises:
            BatchFinderError, UserCodeError: what the step raised. A replaceable worker has to be
                started again then.
        """
        ...

    def end(self) -> None:
        """Give everything back. Safe to call twice."""
        ...
