"""The protocol of workers, which try sizes for a search in any process. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from batchfinder.probing.attempt import Attempt
from batchfinder.probing.notes import Notes
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.place import Place
from batchfinder.search.bounds import Bounds

if TYPE_CHECKING:
    from batchfinder.training.step import TrainingStep


@dataclass(frozen=True)
class EstimateOrder:
    """An order to estimate the answer.

    Attributes:
        function: the name of a function, ``module:function``. It is called with the setup, the
            options, the device's name, the budget and the bounds. It returns a size or None, and
            texts for the user.
        bounds: the sizes that may be tried.
    """

    function: str
    bounds: Bounds


@dataclass(frozen=True)
class Order:
    """An order to start a worker.

    Attributes:
        options: the options of the search.
        group: the process group to join, as plain data; None if the worker trains alone.
        estimate: the estimate to make during the steps; None for no estimate.
    """

    options: ProbeOptions
    group: Mapping[str, Any] | None = None
    estimate: EstimateOrder | None = None


@dataclass(frozen=True)
class Ranks:
    """The ranks that train together with this process.

    Attributes:
        local_world_size: the number of ranks on this machine.
        all_agree: asks all ranks; returns True if each says yes.
        make_step: makes the training step like :class:`TrainingStep`, from the batches, the size to
            warm up with, and the arguments of a step; None for the step of the mode.
    """

    local_world_size: int
    all_agree: Callable[[bool], bool]
    make_step: Callable[..., TrainingStep] | None = None


class Worker(Protocol):
    """Tries one size after the other. Its kinds derive from this class.

    Attributes:
        is_replaceable: True if a second start gives a fresh process, without traces of earlier
            probes.
        notes: texts for the user so far.
    """

    is_replaceable: bool
    notes: Notes

    @property
    def is_running(self) -> bool:
        """True if an attempt needs no other start, as far as is known."""
        return True

    def start(self, order: Order) -> Place:
        """Prepare for the first size. A second start makes the worker as good as new.

        Raises:
            BatchFinderError, UserCodeError: the setup cannot be loaded or used.
        """
        ...

    def attempt(self, batch_size: int, confirm: bool) -> Attempt:
        """Try a size.

        Raises:
            BatchFinderError, UserCodeError: the step raised it. Then a replaceable worker must be
                started again.
        """
        ...

    def estimate(self) -> tuple[int | None, list[str]]:
        """Return the estimate that the start ordered, or None; and texts for the user."""
        return None, []

    def fingerprint(self) -> dict[str, Any] | None:
        """Return what the answer depends on, as plain data; None if it cannot be read.

        Raises:
            WorkerError: the worker died.
        """
        ...

    def end(self) -> None:
        """Release everything. Safe to call twice."""
        ...
