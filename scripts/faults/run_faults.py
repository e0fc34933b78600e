"""The faults of ``batchfinder run``: scripts that misbehave, and drivers that are ended."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from faults import Fault

GROUP = "a foreign script"
SCRIPT = Path(__file__).with_name("run_script.py")
LARGEST = 4
OPTIONS = ("--device", "cpu", "--json", "--memory-limit", "1500MiB")
OPTIONS += ("--min-batch-size", "2", "--max-batch-size", str(LARGEST))

HARMLESS = (
    "flood",
    "flood of lines",
    "binary output",
    "ignore signals",
    "handle signals",
    "daemons",
    "close descriptors",
    "loader workers",
    "train in a thread",
    "other folder",
    "empty the temporary folder",
    "write garbage",
    "save",
    "exit after a step",
    "hang in the validation",
    "die in the validation",
)
"""These change no answer."""

FATAL = ("exit at once", "interrupt itself", "read input", "die after a step", "kill itself")
FATAL += ("kill its supervisor",)

WHEN_LARGE = ("kill itself", "crash", "hang", "swallow errors")


def run_faults() -> Iterator[Fault]:
    """Yield every fault of ``batchfinder run``."""
    fault = functools.partial(Fault, GROUP, api="run")
    for deed in HARMLESS:
        yield fault(deed, {"deed": deed}, answers=(LARGEST, LARGEST))
    for deed in FATAL:
        yield fault(deed, {"deed": deed}, answers=(0, 0), error=True)
    yield fault("hang", {"deed": "hang"}, answers=None, error=True, options=("--timeout", "15"))
    for deed in WHEN_LARGE:
        large = f"{deed} when large"
        yield fault(large, {"deed": large}, answers=(2, 2), options=("--timeout", "45"))
    for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"):
        number = signal.Signals[name]
        hang = {"deed": "hang"}
        yield fault(f"{name} to us", hang, answers=None, send=number, after_seconds=9)


def run_command(fault: Fault) -> list[str]:
    """Return the command of a fault."""
    script = [sys.executable, str(SCRIPT), "--batch-size", "{batch_size}"]
    script += ["--deed", str(fault.arguments["deed"]), "--scratch", "{scratch}"]
    return [
        sys.executable,
        "-m",
        "batchfinder",
        "run",
        "--no-cache",
        *OPTIONS,
        *fault.options,
        "--",
        *script,
    ]
