"""A worker in another process, as its parent sees it. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from batchfinder.errors import WorkerDiedError, WorkerError, WorkerGarbledError, WorkerHungError
from batchfinder.probing.attempt import Attempt, error_from_dict
from batchfinder.probing.notes import Notes
from batchfinder.probing.place import Place
from batchfinder.probing.workers.hung import StepTimes, attempt_of
from batchfinder.probing.workers.process import WorkerProcess, never
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.probing.workers.worker import Order, Worker
from batchfinder.units import format_seconds

# Time limit for loading a setup. It may download a large checkpoint.
LOADING_SECONDS = 3600.0

# Time limit for an estimate. Most estimates take seconds.
LONGEST_ESTIMATE_SECONDS = 300.0

# Time limit for a process to end its fork on request.
ENDING_SECONDS = 15.0


class ProcessWorker(Worker):
    """A worker in another process; see :class:`~batchfinder.probing.workers.worker.Worker`.

    Args:
        launch: starts the process.
        source: the source from which the process loads the setup; None if it has the setup.
        probe_timeout_seconds: time after which a probe counts as hung; None to decide by the steps
            so far.
        loading_timeout_seconds: time after which loading the setup counts as hung.
        step_times: the durations of steps so far.
    """

    is_replaceable = True

    def __init__(
        self,
        launch: Callable[[], WorkerProcess],
        source: SetupSource | None = None,
        *,
        probe_timeout_seconds: float | None = None,
        loading_timeout_seconds: float = LOADING_SECONDS,
        step_times: StepTimes | None = None,
    ) -> None:
        self.notes = Notes()
        self._launch = launch
        self._source = source
        self._timeout_seconds = probe_timeout_seconds
        self._loading_seconds = loading_timeout_seconds
        self._step_times = step_times or StepTimes()
        self._process: WorkerProcess | None = None
        self._restarts = self._is_new = False
        self._ordered = 0
        self._estimate: tuple[int | None, list[str]] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self, order: Order, is_given_up: Callable[[], bool] = never) -> Place:
        """Start as in the protocol. While waiting, ``is_given_up`` is called again and again.

        Raises:
            WorkerError: the worker died while loading, took too long, or its answer was no answer.
            WorkerReleasedError: ``is_given_up`` returned True.
        """
        if self._process is None or not (self._restarts and self._process.is_alive()):
            self.end()
            self._process = self._launch()
        self._is_new = True
        source = self._source and self._source.to_dict()
        try:
            self._send(**asdict(order), source=source)
            answer = self._receive(self._loading_seconds, is_given_up)
        except WorkerDiedError as end:
            self.end()
            raise WorkerError(
                f"the target ended its process while it was loading: {end}"
                + (f"; the last it printed was {end.last_words!r}" if end.last_words else "")
            ) from None
        except WorkerHungError:
            self.end()
            raise WorkerError(
                f"the target was still loading after {format_seconds(self._loading_seconds)}. Try "
                "calling its function by yourself to see what it waits for"
            ) from None
        except WorkerGarbledError:
            self.end()
            raise
        self._restarts = answer["restarts"]
        self.notes.add(*answer["warnings"])
        return Place(**answer["place"])

    def attempt(
        self, batch_size: int, confirm: bool, is_given_up: Callable[[], bool] = never
    ) -> Attempt:
        started = time.monotonic()
        self._send(batch_size=batch_size, confirm=confirm)
        steps = 0
        try:
            while True:
                answer = self._receive(self._patience(batch_size, started), is_given_up)
                if self._is_new:
                    self._is_new = False
                    self._step_times.note_start(time.monotonic() - started)
                if answer["answer"] != "step":
                    break
                steps += 1
                if answer["compiles"]:
                    self._step_times.note_compiling()
        except (WorkerDiedError, WorkerGarbledError, WorkerHungError) as end:
            seconds = time.monotonic() - started
            self._give_up()
            return attempt_of(end, batch_size, confirm, steps, seconds)
        except WorkerError:  # another rank has failed
            self._give_up()
            raise
        attempt = Attempt.from_dict(answer["attempt"])
        if attempt.probe.step_seconds:
            self._step_times.note(batch_size, attempt.probe.step_seconds)
        return attempt

    def estimate(self) -> tuple[int | None, list[str]]:
        if self._estimate is None and not self._restarts:
            self._send(estimate=True)  # there is no fork, so the worker makes it
        try:
            if self._estimate is None and self._process is not None:
                self._receive(LONGEST_ESTIMATE_SECONDS, until_estimate=True)
        except WorkerHungError:
            if not self._restarts:
                self.end()  # it still works on the estimate
        except (WorkerDiedError, WorkerGarbledError):
            self.end()
        seconds = f"{LONGEST_ESTIMATE_SECONDS:.0f} s"
        late = f"the search started without an estimate: none came within {seconds}"
        return self._estimate or (None, [late])

    def fingerprint(self) -> dict[str, Any] | None:
        self._send(fingerprint=True)
        facts: dict[str, Any] | None = self._receive(self._loading_seconds)["facts"]
        return facts

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _give_up(self) -> None:
        """End the worker, but keep a process that can fork another one from the loaded target."""
        if not self._restarts:
            self.end()
            return
        try:
            self._send(end=True)
            self._receive(ENDING_SECONDS)
        except WorkerError:
            self.end()

    def _send(self, **order: Any) -> None:
        assert self._process is not None
        self._ordered += 1
        self._process.send({"id": self._ordered, **order})

    def _receive(
        self,
        timeout_seconds: float,
        is_given_up: Callable[[], bool] = never,
        *,
        until_estimate: bool = False,
    ) -> dict[str, Any]:
        """Return the next answer to the last order, or raise its error. Keep estimates for later.

        Raises the errors of :meth:`WorkerProcess.receive` too.
        """
        assert self._process is not None
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            answer = self._process.receive(left, is_given_up)
            if answer["answer"] == "estimate":
                self._estimate = answer["batch_size"], answer["notes"]
                if until_estimate:
                    return answer
            elif answer["to"] == self._ordered and not until_estimate:
                if answer["answer"] == "error":
                    raise error_from_dict(answer)
                return answer

    def _patience(self, batch_size: int, started: float) -> float:
        if self._timeout_seconds is not None:
            return max(0.0, started + self._timeout_seconds - time.monotonic())
        return self._step_times.patience_seconds(batch_size, self._is_new)
