"""Forks of the user's own process, which serve as its workers. Linux on the CPU only.

What cannot be sent to another process (a model whose class the script itself defines, a lambda, all
that a notebook holds) is there in a fork, and so is the memory that the process has in use, as it
will be in training.

The threads of OpenMP, which run PyTorch's operators, are not, and a fork would wait for them for
ever (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=58378). So OpenMP is asked to end them first, as
its specification provides for (omp_pause_resource_all, OpenMP 5.0, section 3.2.44); it starts
them again where it needs them next. What an accelerator's driver has set up does not survive a
fork, nor do autograd's threads for its devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from batchfinder.errors import WorkerError
from batchfinder.probing.workers.child import main
from batchfinder.probing.workers.forked import ForkedProcess, WorkerPipes

if TYPE_CHECKING:
    from batchfinder.training.setup import TrainingSetup

# GNU's, LLVM's and Intel's runtime, as files in the memory map of a process.
_RUNTIMES = re.compile(r"(/.*/lib(?:gomp|omp|iomp5)\b[^/]*\.so[^/]*)$", re.MULTILINE)
# Its threads would be waited for in a fork, too.
_COMPILER = "torch._inductor.async_compile"

_PAUSE = "omp_pause_resource_all"
_PAUSE_HARD = 2


def can_be_forked() -> bool:
    """Whether PyTorch runs on the CPU in a fork of this process.

    Not where it has compiled something, or where there is an accelerator.
    """
    from batchfinder.probing.devices.choose import accelerator  # needs torch

    if sys.platform != "linux" or accelerator() is not None or _COMPILER in sys.modules:
        return False
    return all(hasattr(runtime, _PAUSE) for runtime in _openmp())


def fork_here(setup: TrainingSetup) -> ForkedProcess:
    """Fork this process into a worker that has its setup already.

    Only the calling thread goes on in the fork. It never returns from here.

    Args:
        setup: what to train.

    Raises:
        WorkerError: the system has no room for another process.
    """
    for runtime in _openmp():
        getattr(runtime, _PAUSE)(_PAUSE_HARD)
    with WorkerPipes() as pipes:
        with warnings.catch_warnings():
            # Python warns of other threads. Of ours none is needed there; a fork that waits for a
            # lock of another one's is a probe that hangs, and is ended as such.
            warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
            try:
                pid = os.fork()
            except OSError as error:
                raise WorkerError(
                    f"this process cannot be forked to try sizes ({error}); give it more room, or "
                    "use batchfinder find"
                ) from None
        if pid == 0:
            try:
                _serve(pipes, setup)
            finally:
                os._exit(1)
        return pipes.process(pid, functools.partial(_exit_status, pid))


def _serve(pipes: WorkerPipes, setup: TrainingSetup) -> None:
    # A session of its own: all that it starts can be ended with it.
    os.setsid()
    signal.set_wakeup_fd(-1)  # an event loop's, which it shares with its parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # What the parent has written and not flushed, and no longer needs, is the parent's alone.
    gc.freeze()
    pipes.take_as_standard_streams()
    sys.stdin = _text(0, "r")
    sys.stdout = sys.stderr = _text(2, "w")
    main(setup)


def _text(descriptor: int, mode: str) -> IO[str]:
    line_by_line = 1
    return open(descriptor, mode, line_by_line, errors="replace", closefd=False)


def _openmp() -> Iterator[ctypes.CDLL]:
    """The OpenMP runtimes in this process: several libraries may have brought their own."""
    for path in set(_RUNTIMES.findall(Path("/proc/self/maps").read_text())):
        with contextlib.suppress(OSError):  # the file has been replaced since
            yield ctypes.CDLL(path)


def _exit_status(pid: int) -> int:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:  # somebody else has waited for it
        return 0
    return os.waitstatus_to_exitcode(status)
