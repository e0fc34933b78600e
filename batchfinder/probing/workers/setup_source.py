"""The source from which another process loads the setup: the target and its arguments."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchfinder.training.setup import TrainingSetup


@dataclass(frozen=True)
class SetupSource:
    """The source from which a worker loads the setup.

    Attributes:
        target: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``.
        arguments: keyword arguments for the target's function.
        sample: a function that returns the example batch, written like a target; None without one.
            It is used if the setup has no batches of its own.
        input_spec: the shapes of an example batch as text; None without one. It is used if the
            setup has no batches of its own.
        loader: a function that returns the user's loader, written like a target; None without one.
        optimizer: the name of a class of ``torch.optim`` that replaces the setup's optimizer; None
            to keep it.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sample: str | None = None
    input_spec: str | None = None
    loader: str | None = None
    optimizer: str | None = None

    def with_arguments(self, more: Mapping[str, Any]) -> SetupSource:
        """Return the source with more arguments for the target's function."""
        return replace(self, arguments={**self.arguments, **more})

    def to_dict(self) -> dict[str, Any]:
        """Return the source as plain data, ready for JSON."""
        # JSON has no tuples and no sets, and turns keys into text.
        return {**vars(self), "arguments": pickle.dumps(dict(self.arguments)).hex()}


_loads_for_a_search = threading.Event()

files_read: set[str] = set()
"""The files that the target's code read while loading, such as its configuration."""


def is_worker() -> bool:
    """Return True if this process has loaded a setup to try sizes of it."""
    return _loads_for_a_search.is_set()


def mark_as_worker() -> None:
    """Mark this process as a worker, so that its code cannot start a search itself."""
    _loads_for_a_search.set()


def load_from(source: Mapping[str, Any]) -> tuple[TrainingSetup, list[str]]:
    """Load the setup from the data of :meth:`SetupSource.to_dict`, in the worker process.

    Returns the setup, and texts for the user. Raises what ``load_setup`` raises.
    """
    from batchfinder.training.loading import load_setup  # imports torch, which the parent does not

    mark_as_worker()
    with _noting_files():
        arguments = pickle.loads(bytes.fromhex(source["arguments"]))
        return load_setup(**{**source, "arguments": arguments})


@contextmanager
def _noting_files() -> Iterator[None]:
    """Record the files that are opened for reading in :data:`files_read`, during the block."""
    is_over = False

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or is_over:
            return
        path, mode = arguments[0], arguments[1]
        if isinstance(path, str | os.PathLike) and str(mode).startswith("r"):
            files_read.add(str(Path(path).absolute()))

    sys.addaudithook(note)  # an audit hook cannot be removed
    try:
        yield
    finally:
        is_over = True
