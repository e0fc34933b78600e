"""Worker processes that have imported PyTorch before they are needed. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from batchfinder.probing.workers.forked import ForkServer
from batchfinder.probing.workers.own_fork import fork_here
from batchfinder.probing.workers.process import WorkerProcess
from batchfinder.probing.workers.waiting import never

if TYPE_CHECKING:
    from batchfinder.training.setup import TrainingSetup


class WorkerSupply:
    """Where the workers of one search come from.

    Where training runs on the CPU they are forked: a new one is there at once, and a single import
    competes with the steps for the same cores. Elsewhere a spare one imports PyTorch meanwhile.
    A setup that only this process has makes forks of this process, see
    :mod:`~batchfinder.probing.workers.own_fork`.

    Args:
        device: that was asked for; None: the workers choose it.
        show_output: whether what workers print is passed on to standard error.
        own_setup: what this process itself is to be forked with; None: workers load theirs.
    """

    def __init__(
        self, device: str | None, show_output: bool, own_setup: TrainingSetup | None = None
    ) -> None:
        self._show_output, self._own_setup = show_output, own_setup
        self._forks = _is_cpu(device)
        self._server: ForkServer | None = None
        self._spare: WorkerProcess | None = None

    def take(
        self, timeout_seconds: float, is_given_up: Callable[[], bool] = never
    ) -> WorkerProcess:
        """A worker that nobody else has.

        Args:
            timeout_seconds: how long it may take to import PyTorch.
            is_given_up: asked again and again meanwhile.

        Raises:
            WorkerHungError: it took longer.
            WorkerReleasedError: it was given up.
        """
        if self._own_setup is not None:
            return WorkerProcess(self._show_output, fork_here(self._own_setup))
        if self._forks:
            self._server = self._server or ForkServer()
            process = self._server.fork(timeout_seconds, is_given_up)
            if process is None:
                self.close()
            return WorkerProcess(self._show_output, process)
        spare, self._spare = self._spare, None
        if spare is not None and not spare.is_alive():  # its death says nothing of the target
            spare.kill()
            spare = None
        return spare or WorkerProcess(self._show_output)

    def prepare(self, device: str) -> None:
        """Have the next worker ready.

        Args:
            device: that the last one has chosen.
        """
        if self._own_setup is not None:
            return
        self._forks = self._forks or _is_cpu(device)
        if self._forks:
            self._server = self._server or ForkServer()
        else:
            self._spare = WorkerProcess(self._show_output)

    def close(self) -> None:
        """End all that nobody has taken. Safe to call twice."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._spare is not None:
            self._spare.kill()
            self._spare = None


def _is_cpu(device: str | None) -> bool:
    return device == "cpu" and sys.platform == "linux"
