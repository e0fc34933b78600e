"""Enter every Python process of a launch, and install the hook once PyTorch is imported.

Python imports the first ``sitecustomize`` on its path. This one leaves ``sys.path``, so that it
hides no module of the script, then runs the ``sitecustomize`` that it has hidden. If PYTHONPATH is
ignored or replaced, the wheel's ``batchfinder_run.pth`` runs this file. Nothing here may end the
script.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = str(Path(__file__).parent)
ORDER = "BATCHFINDER_RUN"
ENTERED = "_batchfinder_hook"

# Seconds after which a waiting process checks again whether it may go on.
LOOK_SECONDS = 0.01


class Reports:
    """Append lines of JSON to one file for all processes: launchers close inherited pipes."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, event: str, **facts: Any) -> None:
        """Append one line. A single write in append mode never mixes with another process's."""
        line = json.dumps({"event": event, "pid": os.getpid(), **facts}, default=str) + "\n"
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
        if not Path(self._path).exists():
            os.kill(os.getpid(), signal.SIGKILL)


class AfterTorch(importlib.abc.MetaPathFinder):
    """Let PyTorch load as usual, then install the hook.

    The hook waits for the loading, because Transformers looks for PyTorch without importing it.
    """

    def __init__(self, order: dict[str, Any], report: Reports) -> None:
        self._order, self._report = order, report
        self._is_looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the other finders find PyTorch, and install the hook after their loader."""
        if name != "torch" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
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
        try:
            if self._order["is_only_watched"]:
                load("retries").Retries(torch, self._report).install()
                return
            memory = load("memory").Memory(torch, self._order)
            failures = load("failures").Failures(torch, self._order, self._report, memory)
            requests = load("requests").Requests(
                torch, load("recording", self._order["recorder"]), self._report
            )
            load("steps").Steps(
                torch, self._order, self._report, memory, failures, requests
            ).install()
        except Exception as error:  # noqa: BLE001 - the script must run on in any case
            self._report("hook_failed", text=f"{type(error).__name__}: {error}")


def load(name: str, path: str | None = None) -> Any:
    """Load a file under a name that no script uses; without a path, one of this folder."""
    full = f"_batchfinder_hook_{name}"
    spec = importlib.util.spec_from_file_location(full, path or f"{HERE}/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[full] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_hidden() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def enter() -> None:
    """Start to watch this process, if it belongs to a launch."""
    sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder or ".") != HERE]
    if ENTERED in sys.modules:
        return
    try:
        order = json.loads(Path(os.environ[ORDER]).read_text(encoding="utf-8"))
    except (KeyError, OSError, ValueError):  # no launch, or one that is over
        return
    sys.modules[ENTERED] = ModuleType(ENTERED)
    report = Reports(order["reports"])
    report("alive")
    sys.meta_path.insert(0, AfterTorch(order, report))


if __name__ in ("sitecustomize", ENTERED):
    enter()
if __name__ == "sitecustomize":
    run_hidden()
