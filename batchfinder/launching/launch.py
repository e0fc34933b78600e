"""Launch a command with the hook, read the reports of its processes, and end it."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from batchfinder.launching.guardian import PROC, descendants, stat_of
from batchfinder.launching.template import Template
from batchfinder.probing.workers.process import NO_RESERVES

HOOK = Path(__file__).parent / "hook"
GUARDIAN = Path(__file__).parent / "guardian.py"
LOOK_SECONDS = 0.02  # between two looks at the reports
# Lines of output that are kept, and bytes of each: enough for a traceback, but bounded.
KEPT_LINES, KEPT_LINE_LENGTH = 60, 2000
# Experiment trackers must not record launches: they are not training runs.
TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",  # only for frameworks' integrations of Comet
    "COMET_AUTO_LOG_DISABLE": "1",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
# MLflow cannot be switched off, so it records into the launch's folder, which does not know these.
OF_ANOTHER_STORE = ("MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID")


class Launch:
    """A command at one batch size, from its start to the end of its last process.

    Args:
        template: the command.
        batch_size: the size to run it at.
        order: the limits and error patterns for the hook.
        steps: how many steps each process may run, until :meth:`allow` allows more.
        show_output: True to copy the command's output to standard error.

    Attributes:
        exit_status: the command's exit status, once it has ended by itself. A negative number is
            the signal that ended it.
        start_error: why the command could not be started; "" if it could.
    """

    def __init__(
        self,
        template: Template,
        batch_size: int,
        order: dict[str, Any],
        steps: int,
        *,
        show_output: bool = False,
    ) -> None:
        self.exit_status: int | None = None
        self.start_error = ""
        self._folder = Path(tempfile.mkdtemp(prefix="batchfinder-"))
        with ExitStack() as on_error:
            on_error.callback(shutil.rmtree, self._folder, ignore_errors=True)
            (self._folder / "scratch").mkdir()
            (self._folder / "tmp").mkdir()
            self.allow(steps)
            self._exit_file = self._folder / "exit"
            reports = self._folder / "reports"
            reports.touch()
            order_file = self._folder / "order.json"
            order_file.write_text(json.dumps(order), encoding="utf-8")
            arguments, variables = template.fill(batch_size, self._folder)
            environment = {
                **{k: value for k, value in os.environ.items() if k not in OF_ANOTHER_STORE},
                **TRACKERS_OFF,
                "MLFLOW_TRACKING_URI": (self._folder / "mlruns").as_uri(),
                **NO_RESERVES,
                "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR")
                or _usual_cache_of_kernels(),
                "TMPDIR": str(self._folder / "tmp"),
                **variables,
                "BATCHFINDER": "1",
                "PYTHONUNBUFFERED": "1",  # a script that is ended as hung flushes nothing
            }
            environment = hooked(order_file, environment)
            self._reports = reports.open(encoding="utf-8")
            # With -I and -S it starts in 10 ms and does not load the hook.
            guardian = [sys.executable, "-I", "-S", str(GUARDIAN), str(self._exit_file)]
            self._guardian = subprocess.Popen(
                [*guardian, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the driver, which ends everything in order
            )
            self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)
            self._reader = threading.Thread(target=self._read, args=(show_output,), daemon=True)
            self._reader.start()
            on_error.pop_all()

    @property
    def output(self) -> str:
        """The last lines that the command printed."""
        return b"".join(self._lines).decode(errors="replace")

    def allow(self, steps: int) -> None:
        """Let each process run this many steps in total."""
        new = self._folder / "allowed.new"
        new.write_text(str(steps))
        new.replace(self._folder / "allowed")

    def end_epoch(self) -> None:
        """Let each process end its epoch, and validate, instead of running more steps."""
        (self._folder / "epoch_ends").touch()

    def reports(self) -> Iterator[dict[str, Any] | None]:
        """Yield reports of the processes until the command ends; None while there is no new one."""
        while True:
            has_ended = self._guardian.poll() is not None
            yield from new_reports(self._reports)
            if has_ended:
                return
            yield None
            time.sleep(LOOK_SECONDS)

    def processes(self) -> list[int]:
        """Return the ids of all processes of the command."""
        return [*descendants(self._guardian.pid)]

    def has_python(self, seconds: float) -> bool:
        """Return True if the command has a Python process that is older than ``seconds``."""
        return any(_is_python(pid, seconds) for pid in self.processes())

    def owns(self, path: str) -> bool:
        """Return True for a file that is removed with the launch, as those in its scratch."""
        return Path(path).is_relative_to(self._folder)

    def close(self) -> None:
        """End every process of the command and remove its folder. Safe to call twice."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        await_end(self._guardian)
        self._reader.join(timeout=1)
        try:
            status, _, self.start_error = self._exit_file.read_text().partition(" ")
            self.exit_status = int(status)
        except (OSError, ValueError):  # the command was ended, so there is no status
            pass
        self._reports.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, show_output: bool) -> None:
        pipe: IO[bytes] | None = self._guardian.stdout
        assert pipe is not None
        while line := pipe.readline(KEPT_LINE_LENGTH):
            self._lines.append(line)
            if show_output:
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()
        pipe.close()


def await_end(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended; set its exit status, 0 if that is lost.

    Not by its wait(): a signal's handler that raised in poll() or wait() may have left locked what
    that would wait for.
    """
    if process.returncode is None:
        status = 0
        with suppress(ChildProcessError):
            _, status = os.waitpid(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)


def _usual_cache_of_kernels() -> str:
    """Return PyTorch's usual cache of compiled kernels, which another TMPDIR would move."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        user = f"uid_{os.getuid()}"  # as PyTorch calls it
    return f"{tempfile.gettempdir()}/torchinductor_{user}"


def new_reports(file: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield the whole reports that processes have added to a file since it was last read."""
    while True:
        position = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(position)
            return
        yield json.loads(line)


def hooked(order: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment in which each Python process loads the hook, with its order."""
    # The hook has to come first on the path. It runs the sitecustomize that it hides.
    python_path = [str(HOOK), environment.get("PYTHONPATH", "")]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "BATCHFINDER_RUN": str(order),
        # For the wheel's .pth file, in case a Python process does not get PYTHONPATH.
        "BATCHFINDER_HOOK": str(HOOK / "sitecustomize.py"),
    }


def _is_python(pid: int, older_than_seconds: float) -> bool:
    stat = stat_of(pid)
    try:
        name = (PROC / str(pid) / "exe").readlink().name
    except OSError:  # the process has ended
        return False
    uptime = float((PROC / "uptime").read_text().split()[0])
    age = uptime - int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return name.startswith("python") and age > older_than_seconds
