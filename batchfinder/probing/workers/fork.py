"""Forks of this process that serve as workers. Linux only.

A fork starts with everything in its process: a target that was loaded once, or the model of a
script or notebook. It also starts with the memory that this process uses, as training will.

OpenMP's threads run PyTorch's operators, but a fork does not have them and would wait for them
forever (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=58378). So OpenMP is asked to end them before
the fork (omp_pause_resource_all, OpenMP 5.0, section 3.2.44). It starts them again at its next use.
An accelerator's driver does not work in a fork, nor do autograd's threads for its devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from batchfinder.errors import WorkerError

# The files of GNU's, LLVM's and Intel's OpenMP runtime in the memory map of a process.
_RUNTIMES = re.compile(r"(/.*/lib(?:gomp|omp|iomp5)\b[^/]*\.so[^/]*)$", re.MULTILINE)
_COMPILER = "torch._inductor.async_compile"

_PAUSE = "omp_pause_resource_all"
_PAUSE_HARD = 2

# With this variable, ``torch.cuda.is_available`` does not start the driver
# (https://docs.pytorch.org/docs/stable/notes/cuda.html).
ASKS_WITHOUT_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# The time limit for the trial in a fork. A first step takes far less.
_TRIAL_SECONDS = 10.0

# The lowest file descriptor above the standard streams 0, 1 and 2.
_ABOVE_STANDARD = 3


def obstacle_to_forks() -> str:
    """Return why PyTorch cannot train in a fork of this process; "" if it can."""
    if sys.platform != "linux":
        return "forks of PyTorch are safe on Linux only"
    fixed = [runtime for runtime in _openmp() if not hasattr(runtime, _PAUSE)]
    if fixed:
        return f"{fixed[0]._name} does not let go of its threads"
    if not _trains_in_a_fork():
        return "a step in a trial fork failed, as after an accelerator's driver was started"
    return ""


def _trains_in_a_fork() -> bool:
    """Train in a fork for a moment; return True if that worked."""
    try:
        trial = ForkedProcess(_train)
    except WorkerError:  # the system has no memory for another process
        return False
    try:
        return trial.wait(_TRIAL_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        trial.kill()
        for pipe in (trial.stdin, trial.stdout, trial.stderr):
            pipe.close()


def _train() -> None:
    """Train for a moment, and end this process with the exit status 0 if that worked."""
    import torch

    for module in (torch.cuda, torch.xpu):
        is_in_bad_fork = getattr(module, "_is_in_bad_fork", lambda: False)
        # Without a device the driver is not in the way: bitsandbytes asks for it when imported.
        if is_in_bad_fork() and module.device_count():
            os._exit(1)
    with torch.inference_mode(False), torch.enable_grad():  # the caller may have turned these off
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    os._exit(0)


class ForkedProcess:
    """A fork of this process, with the part of :class:`subprocess.Popen` that a worker needs.

    Only the calling thread continues in the fork. In the fork, the constructor never returns.

    Args:
        serve: runs in the fork. It reads orders from standard input and writes answers to standard
            output.
        closed_there: file descriptors to close in the fork.

    Raises:
        WorkerError: the system has no memory for another process.
    """

    def __init__(self, serve: Callable[[], None], closed_there: Iterable[int] = ()) -> None:
        _pause_openmp()
        # If a standard stream is closed, a new pipe would get its number.
        pipes = [[_above_standard(end) for end in os.pipe()] for _ in range(3)]
        (orders, to_fork), (from_fork, answers), (printed, output) = pipes
        ours, theirs = (to_fork, from_fork, printed), (orders, answers, output)
        try:
            self.pid = _fork()
        except OSError as error:
            for end in (*ours, *theirs):
                os.close(end)
            raise WorkerError(
                f"this process cannot be forked to try sizes ({error}). Try batchfinder find, or "
                "end other processes"
            ) from None
        if self.pid == 0:
            try:
                _become_worker(theirs, (*ours, *closed_there))
                serve()
            finally:
                os._exit(1)
        for end in theirs:
            os.close(end)
        self.stdin: IO[bytes] = os.fdopen(to_fork, "wb")
        self.stdout: IO[bytes] = os.fdopen(from_fork, "rb")
        self.stderr: IO[bytes] = os.fdopen(printed, "rb")
        self._status = 0
        self._has_ended = threading.Event()
        threading.Thread(target=self._await_end, daemon=True).start()

    def poll(self) -> int | None:
        """Return the exit status; None until the fork has ended."""
        return self._status if self._has_ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the fork has ended, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: the fork has not ended in time.
        """
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self._status

    def kill(self) -> None:
        """Kill the fork, unless it has ended."""
        if not self._has_ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _await_end(self) -> None:
        with contextlib.suppress(ChildProcessError):  # other code has waited for it
            _, status = os.waitpid(self.pid, 0)
            self._status = os.waitstatus_to_exitcode(status)
        self._has_ended.set()


def _pause_openmp() -> None:
    for runtime in _openmp():
        getattr(runtime, _PAUSE)(_PAUSE_HARD)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of other threads. The fork needs none of ours. If it waits for a lock that
        # another thread holds, the probe counts as hung and is ended.
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        pid = os.fork()
    compiler = sys.modules.get(_COMPILER)
    if pid == 0 and compiler is not None:
        # Its pools are caches. The fork would wait for their threads, which it does not have.
        compiler.AsyncCompile.pool.cache_clear()
        compiler.AsyncCompile.process_pool.cache_clear()
    return pid


def _become_worker(streams: tuple[int, ...], closed: Iterable[int]) -> None:
    # A new session: all processes that the fork starts can be ended with it.
    os.setsid()
    signal.set_wakeup_fd(-1)  # an event loop's descriptor is shared with the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Do not collect the parent's garbage here. Its unflushed files would be written twice.
    gc.freeze()
    for end in closed:
        os.close(end)
    for standard, end in enumerate(streams):
        os.dup2(end, standard)
        os.close(end)
    sys.stdin = _text(0, "r")
    sys.stdout = sys.stderr = _text(2, "w")


def _above_standard(end: int) -> int:
    import fcntl  # not on Windows

    if end >= _ABOVE_STANDARD:
        return end
    higher = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _ABOVE_STANDARD)
    os.close(end)
    return higher


def _text(descriptor: int, mode: str) -> IO[str]:
    line_by_line = 1
    return open(descriptor, mode, line_by_line, errors="replace", closefd=False)


def _openmp() -> Iterator[ctypes.CDLL]:
    """Yield the OpenMP runtimes in this process. Several libraries may have brought their own."""
    for path in set(_RUNTIMES.findall(Path("/proc/self/maps").read_text())):
        with contextlib.suppress(OSError):  # the file was replaced since
            yield ctypes.CDLL(path)
