"""Where another process gets the setup from, as it is told and as it loads it."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchfinder.training.setup import TrainingSetup


@dataclass(frozen=True)
class SetupSource:
    """Where a worker gets the setup from.

    Attributes:
        target: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``; empty with a pickle.
        arguments: keyword arguments of the target's function.
        sample: what yields the example batch, written as a target; None: see ``completed``.
        input_spec: the shapes of an example batch as text; None: see ``completed``.
        optimizer: name of a class of ``torch.optim``, in place of the setup's; None: the setup's.
        pickled_setup: a ``TrainingSetup`` as bytes; empty with a target.
        own_setup: of this very process, which is forked into workers; None: they load theirs.
    """

    target: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sample: str | None = None
    input_spec: str | None = None
    optimizer: str | None = None
    pickled_setup: bytes = b""
    own_setup: TrainingSetup | None = None

    def to_order(self) -> dict[str, Any]:
        """The order to load it, without the pickle's bytes, which follow the order's line."""
        if self.own_setup is not None:
            return {}
        if self.pickled_setup:
            from batchfinder.training.state.process_settings import read_switches  # needs torch

            # With the places where this process finds the modules of the pickled classes, and with
            # its switches: the same step takes other memory where the default dtype is another.
            return {
                "pickled_bytes": len(self.pickled_setup),
                # What is no text there is not looked at by Python either.
                "module_path": [place for place in sys.path if isinstance(place, str)],
                "switches": read_switches(),
            }
        return {
            "target": self.target,
            # JSON knows no tuples and no sets, and makes text of keys.
            "arguments": pickle.dumps(dict(self.arguments)).hex(),
            "sample": self.sample,
            "input_spec": self.input_spec,
            "optimizer": self.optimizer,
        }


_loads_for_a_search = threading.Event()


def is_worker() -> bool:
    """Whether this process has loaded a setup to try sizes of it."""
    return _loads_for_a_search.is_set()


def load_ordered(order: Mapping[str, Any]) -> tuple[TrainingSetup, list[str]]:
    """Load what :meth:`SetupSource.to_order` tells, in the process that got the order.

    Args:
        order: with the pickle's bytes as ``pickled_setup``, if it is of one; with the ``setup``
            itself, if it is in this process already.

    Returns:
        The setup, and what the user should know of it.

    Raises:
        UsageError: the pickle does not open here.
        DeviceError: there is no room for what is in it.
        Exception: as :func:`~batchfinder.training.loading.load_setup`.
    """
    _loads_for_a_search.set()
    if "setup" in order:
        return order["setup"], []
    if "pickled_setup" in order:
        return _unpickled(order), []
    from batchfinder.training.loading import load_setup  # needs torch, which the parent may not

    return load_setup(
        order["target"],
        pickle.loads(bytes.fromhex(order["arguments"])),
        sample=order["sample"],
        input_spec=order["input_spec"],
        optimizer=order["optimizer"],
    )


def _unpickled(order: Mapping[str, Any]) -> TrainingSetup:
    from batchfinder.probing.workers.pickled_setup import unpickle_setup
    from batchfinder.training.state.process_settings import set_switches

    sys.path[:] = order["module_path"]
    set_switches(order["switches"])
    return unpickle_setup(order["pickled_setup"])
