"""Load a target once in one process, and fork that process into workers that try sizes."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from batchfinder.errors import WorkerDiedError, WorkerGarbledError, WorkerReleasedError
from batchfinder.probing.attempt import error_to_dict
from batchfinder.probing.devices.collector import collector_off
from batchfinder.probing.workers.child import Line, serve_fork
from batchfinder.probing.workers.fork import ForkedProcess, obstacle_to_forks
from batchfinder.probing.workers.process import WorkerProcess
from batchfinder.probing.workers.setup_source import load_from

if TYPE_CHECKING:
    from batchfinder.training.setup import TrainingSetup


def serve_in_forks(line: Line, order: dict[str, Any]) -> None:
    """Serve orders: in forks of this process if it can be forked, else in this process."""
    setup, warnings = None, []
    if not order["group"]:  # else each worker joins its group first, since the target may use it
        setup, warnings = line.or_tell(lambda: load_from(order["source"]))
    # Imported late, because that takes seconds: mistakes in the target are reported before.
    with collector_off():
        from batchfinder.probing.workers.serving import serve, spare_what_is_loaded
    if not obstacle_to_forks():
        spare_what_is_loaded()
        line.or_tell(lambda: _Host(line, setup, warnings).run(order))
    serve(line, order, setup, warnings)


class _Host:
    """Passes orders on to a fork, and its answers back."""

    def __init__(self, line: Line, setup: TrainingSetup | None, warnings: list[str]) -> None:
        self._line, self._setup, self._warnings = line, setup, warnings
        self._worker: WorkerProcess | None = None
        self._estimating: WorkerProcess | None = None

    def run(self, order: dict[str, Any]) -> None:
        while True:
            if "options" in order:
                self._end(self._worker)
                self._worker = self._fork()
            if "end" in order:
                self._end(self._worker)
                self._line.answer("ended")
            else:
                assert self._worker is not None
                self._worker.send(order)
                self._relay(order)
            order = self._line.next_order()

    def _relay(self, order: dict[str, Any]) -> None:
        """Pass on the worker's answers until the order is carried out or another one comes."""
        line, worker = self._line, self._worker
        assert worker is not None
        receive = functools.partial(worker.receive, is_given_up=lambda: not line.orders.empty())
        try:
            while (answer := receive())["answer"] == "step":
                line.pass_on(answer)
        except WorkerReleasedError:
            return
        except (WorkerDiedError, WorkerGarbledError) as end:
            line.answer("error", **error_to_dict(end))
        else:
            if answer["answer"] == "ready":
                answer["warnings"] = [*self._warnings, *answer["warnings"]]
                answer["restarts"] = True
                self._start_estimate(order, answer["place"])
            line.pass_on(answer)

    def _start_estimate(self, order: dict[str, Any], place: dict[str, Any]) -> None:
        """Make the estimate in a separate fork, while the worker runs steps."""
        if not order["estimate"] or self._estimating or place["device"].startswith("cpu"):
            return
        estimating = self._estimating = self._fork()
        estimating.send({**order, "place": place})

        def pass_on_estimate() -> None:
            from batchfinder.probing.workers.serving import no_estimate

            try:
                self._line.pass_on(estimating.receive())
            except (WorkerDiedError, WorkerGarbledError) as end:
                self._line.pass_on(no_estimate(end))
            self._end(estimating)

        threading.Thread(target=pass_on_estimate, daemon=True).start()

    def _fork(self) -> WorkerProcess:
        others = [process for process in (self._worker, self._estimating) if process]
        kept = [end for process in others for end in process.descriptors]
        serve = functools.partial(serve_fork, self._setup)
        forked = ForkedProcess(serve, (*self._line.descriptors, *kept))
        self._line.forks.add(forked.pid)
        return WorkerProcess(show_output=True, forked=forked)

    def _end(self, process: WorkerProcess | None) -> None:
        if process is not None:
            process.kill()
            self._line.forks.discard(process.pid)
