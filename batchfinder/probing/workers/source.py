"""Where another process gets the setup from: its target, as it is named and as it is loaded."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchfinder.training.setup import TrainingSetup


@dataclass(frozen=True)
class SetupSource:
    """Where a worker gets the setup from.

    Attributes:
        target: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``.
        arguments: keyword arguments of the target's function.
        sample: what yields the example batch, written as a target; None: see ``completed``.
        input_spec: the shapes of an example batch as text; None: see ``completed``.
        loader: what returns the user's loader, written as a target; None: none.
        optimizer: name of a class of ``torch.optim``, in place of the setup's; None: the setup's.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sample: str | None = None
    input_spec: str | None = None
    loader: str | None = None
    optimizer: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The source as plain data, ready for JSON."""
        return {
            "target": self.target,
            # JSON knows no tuples and no sets, and makes text of keys.
            "arguments": pickle.dumps(dict(self.arguments)).hex(),
            "sample": self.sample,
            "input_spec": self.input_spec,
            "loader": self.loader,
            "optimizer": self.optimizer,
        }


_loads_for_a_search = threading.Event()

files_read: set[str] = set()
"""The files that the target's code has read on loading, such as its configuration."""


def is_worker() -> bool:
    """Whether this process has loaded a setup to try sizes of it."""
    return _loads_for_a_search.is_set()


def mark_as_worker() -> None:
    """Note that this process tries sizes, so that its code starts no search itself."""
    _loads_for_a_search.set()


def load_from(source: Mapping[str, Any]) -> tuple[TrainingSetup, list[str]]:
    """Load what :meth:`SetupSource.to_dict` names, in the process that was sent it.

    Returns:
        The setup, and texts for the user.

    Raises:
        Exception: see :func:`~batchfinder.training.loading.load_setup`.
    """
    from batchfinder.training.loading import load_setup  # needs torch, which the parent may not

    mark_as_worker()
    with _noting_files():
        return load_setup(
            source["target"],
            pickle.loads(bytes.fromhex(source["arguments"])),
            sample=source["sample"],
            input_spec=source["input_spec"],
            loader=source["loader"],
            optimizer=source["optimizer"],
        )


@contextmanager
def _noting_files() -> Iterator[None]:
    """Note the files that are opened for reading, in :data:`files_read`."""
    is_over = False

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or is_over:
            return
        path, mode = arguments[0], arguments[1]
        if isinstance(path, str | os.PathLike) and str(mode).startswith("r"):
            files_read.add(str(Path(path).absolute()))

    sys.addaudithook(note)  # which cannot be taken away again
    try:
        yield
    finally:
        is_over = True
