"""The fork server: a process that imports PyTorch, and forks a worker whenever one is asked for.

Started by :class:`~batchfinder.probing.workers.forked.ForkServer` as ``python -m
batchfinder.probing.workers.fork_server``. Each message on its standard input, a socket, brings
four file descriptors: the standard streams of a worker to be, and a pipe on which first its
process id is told, and its exit status as soon as it has ended.

Nothing has run in this process but imports, so that no thread of OpenMP is there yet, which a fork
would lose (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=58378). Workers on an accelerator are not
for it: what its driver has set up does not survive a fork
(https://docs.pytorch.org/docs/stable/notes/multiprocessing.html).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import warnings

DESCRIPTORS = 4

# Of a worker: one receives its orders, and autograd has one.
THREADS = 2

# OpenBLAS uses threads for the product of two vectors as long as that.
LONG_VECTOR = 20_000


def main() -> None:
    """Fork workers until the socket closes; in each of them, serve as one."""
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # All that a worker needs to import.
    from batchfinder.probing.workers import duty  # noqa: F401

    # No collection in a fork is to look at what was imported, let alone to copy the pages.
    gc.collect()
    gc.freeze()
    _map_the_heaps_of_threads()
    # Python warns of threads: those of OpenBLAS, which prepares them for a fork itself.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    orders, answers, output, told = _fork_where_asked(control)
    control.close()
    _fork_under_watch(told, (orders, answers, output))
    _be_as_if_imported_here()

    from batchfinder.probing.workers import child

    child.main()


def _fork_where_asked(control: socket.socket) -> list[int]:
    """Returns in forks only: with the descriptors that came with the message."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that watch the workers end by themselves
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, DESCRIPTORS)
        if not message:
            _end()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return list(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _end() -> None:
    """End after those that watch the workers: in a container nobody else might take note of it."""
    with contextlib.suppress(ChildProcessError):
        os.wait()  # for all of them, as their ends are ignored
    os._exit(0)


def _fork_under_watch(told: int, streams: tuple[int, int, int]) -> None:
    """Returns in the worker, whose end the process that has forked it tells."""
    if (worker := os.fork()) == 0:
        os.close(told)
        # A session of its own: all that it starts can be ended with it.
        os.setsid()
        for standard, stream in enumerate(streams):
            os.dup2(stream, standard)
            os.close(stream)
        return
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(told, f"{worker}\n".encode())
        _, status = os.waitpid(worker, 0)
        os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _map_the_heaps_of_threads() -> None:
    """Have glibc set aside the heaps that threads get, for the forks to inherit.

    For each it maps 128 MiB for a moment (malloc/arena.c), which would stay the mark that the peaks
    of a fork are read off.
    """
    together = threading.Barrier(THREADS)

    def meet() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait()

    threads = [threading.Thread(target=meet, daemon=True) for _ in range(THREADS)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError:  # there is no room for one more
        together.abort()
        return
    for thread in threads:
        thread.join()


def _be_as_if_imported_here() -> None:
    """Do to a fork what importing does to each process of its own.

    Its random numbers are its own. And OpenBLAS has threads, whose stacks count: it ends them at a
    fork, and starts them again where it needs them next.
    """
    import torch

    torch.default_generator.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
        vector = numpy.ones(LONG_VECTOR)
        vector.dot(vector)
