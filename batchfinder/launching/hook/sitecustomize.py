"""Enter every Python process of a launch, and install the hook once PyTorch is imported.

Python imports the first ``sitecustomize`` on its path. This one leaves ``sys.path``, so that it
hides no module of the script, then runs the ``sitecustomize`` that it has hidden. If PYTHONPATH is
ignored or replaced, the wheel's ``batchfinder_run.pth`` runs this file. Nothing here may end the
script, and before PyTorch is imported nothing is imported that Python has not imported itself.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # that of typing, whose import takes milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120 - pathlib is slow to import
ORDER = "BATCHFINDER_RUN"
ENTERED = "_batchfinder_hook"

# Two of its files are loaded too. They import no batchfinder.
PROBING = f"{os.path.dirname(os.path.dirname(HERE))}/probing"  # noqa: PTH120 - as above

# Seconds after which a waiting process checks again whether it may go on.
LOOK_SECONDS = 0.01


class Reports:
    """Append lines of JSON to one file for all processes: launchers close inherited pipes."""

    def __init__(self, path: str) -> None:
        self._path = path

    def alive(self) -> None:
        """Report that the hook has entered this process."""
        self._append(f'{{"event": "alive", "pid": {os.getpid()}}}\n')

    def __call__(self, event: str, **facts: Any) -> None:
        """Append one line."""
        import json

        self._append(json.dumps({"event": event, "pid": os.getpid(), **facts}, default=str) + "\n")

    def _append(self, line: str) -> None:
        """Append a line. A single write in append mode never mixes with another process's."""
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError:  # the launch is over
            return
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def pause(self) -> None:
        """Wait for a moment. End this process at once if the launch is over and has left it."""
        time.sleep(LOOK_SECONDS)
        if not os.path.exists(self._path):  # noqa: PTH110 - as above
            os.kill(os.getpid(), 9)


class AfterTorch:
    """A finder that lets PyTorch load as usual, then installs the hook.

    The hook waits for the loading, because Transformers looks for PyTorch without importing it.
    """

    def __init__(self, order: str, report: Reports) -> None:
        self._order, self._report = order, report

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the other finders find PyTorch, and install the hook after their loader."""
        if name != "torch":
            return None
        spec = spec_of(name, path, target, without=self)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            original = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                original(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._install(module)

            loader.exec_module = exec_module
        return spec

    def _install(self, torch: ModuleType) -> None:
        import json

        try:
            with open(self._order, encoding="utf-8") as file:  # noqa: PTH123 - as above
                order = json.load(file)
            order["folder"] = os.path.dirname(self._order)  # noqa: PTH120 - as above
        except OSError:  # the launch is over
            return
        try:
            if order["is_only_watched"]:
                load("cache_flushes").Flushes(torch, self._report).install()
                return
            peak = load("process_peak", f"{PROBING}/devices/process_peak.py").ProcessPeak()
            memory = load("memory").Memory(torch, order, peak)
            failures = load("failures").Failures(torch, order, self._report, memory)
            recorder = load("recording", f"{PROBING}/recording.py")
            requests = load("requests").Requests(recorder, self._report)
            files = load("files").Files(torch, order["folder"], self._report)
            epoch_end = load("epoch_end").EpochEnd(
                torch, order, self._report, memory, files, requests
            )
            load("steps").Steps(
                torch, order, self._report, memory, failures, requests, epoch_end
            ).install()
        except Exception as error:  # noqa: BLE001 - the script must run on in any case
            self._report("hook_failed", text=f"{type(error).__name__}: {error}")


def spec_of(
    name: str,
    path: Sequence[str] | None = None,
    target: ModuleType | None = None,
    *,
    without: AfterTorch | None = None,
) -> ModuleSpec | None:
    """Return the first spec that the finders find, apart from one of them."""
    finders = [each for each in sys.meta_path if each is not without]
    found = (each.find_spec(name, path, target) for each in finders if hasattr(each, "find_spec"))
    return next(filter(None, found), None)


def load(name: str, path: str | None = None) -> Any:
    """Load a file under a name that no script uses; without a path, one of this folder."""
    import importlib.util

    full = f"_batchfinder_hook_{name}"
    spec = importlib.util.spec_from_file_location(full, path or f"{HERE}/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_hidden() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    spec = spec_of("sitecustomize")
    if spec is not None and spec.loader is not None:
        import importlib.util

        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def enter() -> None:
    """Start to watch this process, if it belongs to a launch."""
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder or ".") != HERE]
    order = os.environ.get(ORDER, "")
    if ENTERED in sys.modules or not os.path.exists(order):  # noqa: PTH110 - as above
        return
    sys.modules[ENTERED] = type(sys)(ENTERED)
    # The driver makes both files in one folder.
    report = Reports(os.path.join(os.path.dirname(order), "reports"))  # noqa: PTH118, PTH120
    report.alive()
    sys.meta_path.insert(0, AfterTorch(order, report))


if __name__ in ("sitecustomize", ENTERED):
    enter()
if __name__ == "sitecustomize":
    run_hidden()
