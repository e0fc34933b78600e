"""Where a worker process gets the setup from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SetupSource:
    """Where a worker gets the setup from.

    Attributes:
        target: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``; empty with a pickle.
        arguments: keyword arguments of the target's function.
        sample: what yields the example batch, written as a target; None: see ``completed``.
        input_spec: the shapes of an example batch as text; None: see ``completed``.
        optimizer: name of a class of ``torch.optim``, in place of the setup's; None: the setup's.
        pickled_setup: a pickled ``TrainingSetup``; empty with a target.
    """

    target: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sample: str | None = None
    input_spec: str | None = None
    optimizer: str | None = None
    pickled_setup: bytes = b""

    def to_order(self) -> dict[str, Any]:
        """The order to load it, without the pickle's bytes, which follow the order's line."""
        if self.pickled_setup:
            # With the places where this process finds the modules of the pickled classes.
            return {
                "pickled_bytes": len(self.pickled_setup),
                "module_path": sys.path,
            }
        return {
            "target": self.target,
            "arguments": dict(self.arguments),
            "sample": self.sample,
            "input_spec": self.input_spec,
            "optimizer": self.optimizer,
        }
