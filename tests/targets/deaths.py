"""Models that end, hang or misuse the process that they are trained in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn


class Mortal(nn.Module):
    """A layer that does something else as well once the batch has ``at`` examples.

    With ``once``, the name of a file, only the first process does it, and leaves its id there.
    """

    def __init__(self, deeds: list[Callable[[], object]], at: int, once: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.deeds, self.at, self.once = deeds, at, once

    def forward(self, rows: Tensor) -> Tensor:
        if len(rows) >= self.at and self._is_due():
            for deed in self.deeds:
                deed()
        output: Tensor = self.layer(rows).mean()
        return output

    def _is_due(self) -> bool:
        if not self.once:
            return True
        try:
            with Path(self.once).open("x") as file:
                file.write(f"{os.getpid()}\n")
        except FileExistsError:
            return False
        return True


def build(deed: str, at: int = 1, once: str = "") -> tuple[nn.Module, Tensor]:
    """``deed``: one or several of DEEDS, separated by blanks."""
    return Mortal([DEEDS[name] for name in deed.split()], at, once), torch.ones(2, 4)


def build_and_do(deed: str, once: str = "") -> nn.Module:
    """Do it while loading."""
    if once:
        Path(once).write_text(f"{os.getpid()}\n")
    DEEDS[deed]()
    return nn.Linear(4, 2)


def die_of(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def segfault() -> None:
    ctypes.string_at(0)


def hang() -> None:
    time.sleep(1000)


def leave_children() -> None:
    """Die as a process with DataLoader workers does: they hold on to all that was open."""
    if os.fork() == 0:
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL)


def leave_a_child_and_hang() -> None:
    os.fork()
    time.sleep(1000)


def complain_and_abort() -> None:
    """Die as a C++ program does that nothing catches the exception of."""
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


def write_garbage() -> None:
    """Write to everything that could be the pipe to the parent."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if (number := int(path.name)) > 2:
                os.write(number, b"not JSON at all\n")
    time.sleep(1000)


def close_everything() -> None:
    os.closerange(3, 100)


def print_much() -> None:
    print("printed " * 10_000)
    sys.stdout.write('{"answer": "probe"}\n')
    os.write(1, b"written to 1\n")
    print("to stderr", file=sys.stderr)


def fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def change_the_process() -> None:
    os.chdir("/")
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    sys.argv[:] = []
    os.environ.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def read_input() -> None:
    assert sys.stdin.read() == ""


def stop_working() -> None:
    sys.exit("enough")


def raise_error() -> None:
    raise ValueError("no such width")


DEEDS: dict[str, Callable[[], object]] = {
    "raise": raise_error,
    "kill": die_of(signal.SIGKILL),
    "abort": die_of(signal.SIGABRT),
    "segfault": segfault,
    "real_time_signal": die_of(40),
    "hang": hang,
    "leave_children": leave_children,
    "leave_a_child_and_hang": leave_a_child_and_hang,
    "complain_and_abort": complain_and_abort,
    "write_garbage": write_garbage,
    "close_everything": close_everything,
    "print": print_much,
    "fork": fork,
    "change_the_process": change_the_process,
    "read_input": read_input,
    "sys_exit": stop_working,
    "os_exit": lambda: os._exit(0),
}
