"""Python processes that start with PyTorch imported, which takes seconds otherwise.

A server imports what workers import, and is forked for each process. It has no threads and trains
nothing, so its forks can do what a new Python process can. Tests of how processes start, and of
what is imported when, use real ones.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from types import ModuleType
from typing import IO, Any, NoReturn

_ONE_AT_A_TIME = threading.Lock()

# In a warm process: the workers that it starts are forks of it, and so are warm, too.
WARM_WORKERS = """
from batchfinder.probing.workers import child, fork, process
process.start_python = lambda _: fork.ForkedProcess(child.main)
"""

# ``python -m batchfinder``.
COMMAND = f"{WARM_WORKERS}from batchfinder.__main__ import main; main()"


class WarmPython:
    """A process that runs a code as ``python -c`` does; a part of :class:`subprocess.Popen`.

    Args:
        arguments: what follows ``python``: ``-c``, the code, and its arguments.
        folder: where it runs.
        new_session: it leads a session of its own.
        environment: what it has beside this process's environment.
    """

    def __init__(
        self,
        *arguments: str,
        folder: str | os.PathLike[str] = ".",
        new_session: bool = False,
        **environment: str,
    ) -> None:
        assert arguments[0] == "-c"
        order = {
            "arguments": arguments[1:],
            "folder": os.path.realpath(folder),
            "new_session": new_session,
            "environment": {**os.environ, **environment},
        }
        (stdin, to), (out, stdout), (errors, stderr), (told, tells) = (os.pipe() for _ in range(4))
        content = json.dumps(order).encode()
        ends = [stdin, stdout, stderr, tells]
        with _ONE_AT_A_TIME:
            socket.send_fds(server(), [len(content).to_bytes(8, "little")], ends)
            server().sendall(content)
        for end in ends:
            os.close(end)
        self.stdin: IO[bytes] = os.fdopen(to, "wb")
        self.stdout: IO[bytes] = os.fdopen(out, "rb")
        self.stderr: IO[bytes] = os.fdopen(errors, "rb")
        self._told = os.fdopen(told, "rb")
        self.pid = int(self._told.readline())
        self._status: int | None = None
        self._waits = threading.Thread(target=self._wait_for_status, daemon=True)
        self._waits.start()

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        self._waits.join(timeout)
        if self._status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self._status

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[str, str]:
        """What it printed, once it has ended."""
        self.stdin.close()
        errors: list[bytes] = []
        with self.stdout, self.stderr:
            reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
            reader.start()
            printed = self.stdout.read()
            reader.join()
        self.wait()
        return printed.decode(), errors[0].decode()

    def _wait_for_status(self) -> None:
        with self._told:
            self._status = int(self._told.readline())


def run_warm(code: str, *arguments: str, **settings: Any) -> str:
    """What a code prints in a warm process; it must end well. See :class:`WarmPython`."""
    process = WarmPython("-c", code, *arguments, **settings)
    printed, errors = process.communicate()
    assert process.wait() == 0, errors
    return printed


def start_command(*words: str, **settings: Any) -> WarmPython:
    """Start ``batchfinder`` in a warm process, with warm workers. See :class:`WarmPython`."""
    return WarmPython("-c", COMMAND, *words, **settings)


@functools.cache
def server() -> socket.socket:
    """The connection to the server, which ends with this process."""
    ours, theirs = socket.socketpair()
    start = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    start.wait()  # the server itself is no child: tests look for processes left behind
    theirs.close()
    return ours


def _serve(connection: socket.socket) -> None:
    """Fork for each order, and tell how each fork ended, until the connection closes."""
    import batchfinder.probing.workers.serving
    import batchfinder.training.loading  # noqa: F401

    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing would wake us
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                tells = running.pop(ended[0])
                os.write(tells, b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
                os.close(tells)
        if connection not in ready:
            continue
        start, ends, _, _ = socket.recv_fds(connection, 8, 4)
        if not start:
            return
        content = b""
        while missing := int.from_bytes(start, "little") - len(content):
            content += connection.recv(missing)
        if (pid := os.fork()) == 0:
            sockets = (connection.fileno(), woken.fileno(), wakes.fileno())
            _become(json.loads(content), ends, [*sockets, *running.values()])
        os.write(ends[3], b"%d\n" % pid)
        for end in ends[:3]:
            os.close(end)
        running[pid] = ends[3]


def _become(order: dict[str, Any], ends: list[int], closed: list[int]) -> NoReturn:
    """Run the code of an order, as a new Python process would."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["new_session"]:
        os.setsid()
    for standard, end in enumerate(ends[:3]):
        os.dup2(end, standard)
    for end in (*ends, *closed):
        os.close(end)
    for standard, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(standard, "w" if standard else "r", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    code, *arguments = order["arguments"]
    del sys.path[0]  # this file's folder
    sys.path[:0] = ["", *(entry for entry in given if entry not in sys.path)]
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = main = ModuleType("__main__")
    status: Any = 0
    try:
        exec(compile(code, "<string>", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:  # noqa: BLE001 - as Python does
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError, ValueError):  # closed by the code
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    _serve(socket.socket(fileno=int(sys.argv[1])))
