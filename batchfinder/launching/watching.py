"""Follow the reports of a launch, and give up if it reports nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

from batchfinder.launching.host_memory import HostWatch
from batchfinder.launching.launch import Launch
from batchfinder.launching.options import RunOptions
from batchfinder.launching.record import Record
from batchfinder.units import format_seconds

# Without --timeout, the first launch may be silent for FIRST_SECONDS, to download or compile. Later
# ones may be silent TIMES_LONGER times as long as the one before, at least LEAST_SECONDS.
FIRST_SECONDS, LEAST_SECONDS, TIMES_LONGER = 600.0, 60.0, 10.0

# A shell script or a container may need ALIVE_SECONDS to start Python. Python itself reports its
# start within PYTHON_SECONDS, even on a busy machine.
ALIVE_SECONDS, PYTHON_SECONDS = 30.0, 3.0

NO_PYTHON = (
    "no Python of the command loaded the hook. Try a command that runs Python with its "
    "environment: not env -i, python -I, -E or -S, and not inside a container"
)


class Patience:
    """The limit on a launch's silence, in seconds. It is learned from earlier launches."""

    def __init__(self, options: RunOptions) -> None:
        self.step = options.step
        self.seconds = options.timeout_seconds or FIRST_SECONDS
        self._learns = options.timeout_seconds is None

    def learn(self, record: Record) -> None:
        """Learn from how long a launch reported nothing."""
        if self._learns and record.steps:
            self.seconds = max(LEAST_SECONDS, TIMES_LONGER * record.longest_silence)


def watch(launch: Launch, record: Record, steps: int, patience: Patience) -> str:
    """Record the reports of a launch until it has shown all that it can, or has ended.

    The ``steps`` are allowed already, and more are one by one. Return why the launch has to be
    ended if it reports nothing for longer than the patience allows; else "".
    """
    for is_silent in _followed(launch, record):
        if record.is_over:
            break
        if is_silent and (hung := _silence(launch, record, patience)):
            return hung
        if record.steps >= steps:
            launch.allow(steps := record.steps + 1)
    return ""


def watch_epoch_end(launch: Launch, record: Record) -> None:
    """Let a launch whose steps fit end its epoch: it validates, and trains on.

    It takes at most as long as the launch has taken so far.
    """
    now = time.monotonic()
    until = now + (now - record.started)
    for is_silent in _followed(launch, record):
        is_over = record.out_of_memory or record.epoch_end.is_over(record.processes)
        if is_over or time.monotonic() > until:
            return
        if is_silent and record.is_level and not record.epoch_end.has_begun:
            record.epoch_end.has_begun = True
            launch.end_epoch()


def _followed(launch: Launch, record: Record) -> Iterator[bool]:
    """Record the reports of a launch until it ends; yield True while there is no new one."""
    host = HostWatch(launch.processes)
    for report in launch.reports():
        if report is not None:
            record.add(report)
        elif shortage := host.shortage():
            record.add({"event": "out_of_memory", "text": shortage, "has_gradients": True})
        yield report is None


def _silence(launch: Launch, record: Record, patience: Patience) -> str:
    seconds = time.monotonic() - record.heard
    if not record.is_alive:
        is_late = seconds > min(ALIVE_SECONDS, patience.seconds)
        if is_late or (seconds > PYTHON_SECONDS and launch.has_python(PYTHON_SECONDS)):
            return NO_PYTHON
    if seconds > patience.seconds:
        reason = f"no {patience.step} ended within {format_seconds(seconds)}"
        reason += "; --timeout allows for more"
        if record.epoch_end.has_validated_first and not record.steps:
            reason += ", and a larger --min-batch-size shortens the validation before it"
        return reason
    return ""
