"""What tests ask of other processes."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from warm import run_warm

from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.process import WorkerProcess
from batchfinder.probing.workers.process_worker import ProcessWorker
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.probing.workers.supervisor import Supervisor
from batchfinder.probing.workers.worker import Order

PATIENCE_SECONDS = 60
REPOSITORY = Path(__file__).resolve().parents[1]


def eventually(condition: Callable[[], Any]) -> Any:
    """What a condition gives as soon as it holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"nothing within {PATIENCE_SECONDS} s")


def order(target: str, **arguments: Any) -> dict[str, Any]:
    """The first order of a worker on the CPU: to load a target."""
    first = asdict(Order(ProbeOptions(device="cpu")))
    return {"id": 1, "source": SetupSource(target, arguments).to_dict(), **first}


def supervisor(source: SetupSource, options: ProbeOptions, **settings: Any) -> Supervisor:
    """As the command line makes it, with settings of a ``ProcessWorker``."""
    worker = ProcessWorker(lambda: WorkerProcess(show_output=False), source, **settings)
    return Supervisor(worker, options)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it, or a thread, has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found + [deeper for child in found for deeper in descendants(child)]


def is_gone(pid: int) -> bool:
    """Whether there is no such process any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def run_python(*arguments: str, folder: Path = REPOSITORY, **environment: str) -> str:
    """What Python prints, run in a folder with this checkout importable; it must end well."""
    # Before what is there already: this machine may keep packages in a folder of their own.
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join(filter(None, [str(REPOSITORY), str(REPOSITORY / "tests"), *before]))
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def idle_bytes() -> int:
    """What a process holds on the CPU that has imported PyTorch, and has not trained yet.

    A build of PyTorch with CUDA holds half a GiB more than one without.
    """
    code = "import batchfinder.probing.workers.serving, batchfinder.probing.devices.cpu as cpu; "
    return int(run_warm(f"{code} print(cpu.CpuDevice().held_bytes())"))
