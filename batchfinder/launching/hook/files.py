"""Keep a script from changing the user's files. Imports no batchfinder.

``torch.save`` and other savers of weights never write over a file older than the launch, such as a
training's best checkpoint, and no new file is renamed to one. Once the epoch of a script ends,
functions that save files do nothing, so that it continues: it trains after its validation, in the
memory that the validation has left. Code that would change a file in another way waits, and so does
code that would send something after that, such as the saved model.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import pathlib
import stat
import sys
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

# Functions that write files without Python's knowledge.
SAVERS = (("safetensors.torch", "serialize_file"), ("torch.jit", "save"), ("cv2", "imwrite"))

# Functions of os that change files, by name.
CHANGERS = (
    "mkdir",
    "rename",
    "replace",
    "remove",
    "unlink",
    "rmdir",
    "link",
    "symlink",
    "truncate",
    "utime",
    "chmod",
)

# The audit events, besides "open", that precede a change of files or the start of a program.
CHANGES = {
    *(f"os.{name}" for name in CHANGERS),
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "sqlite3.connect",
}

# Folders in which files may change, beside that of the launch: devices and caches.
FREE = ("/dev/", "/proc/", *map(os.path.expanduser, ("~/.cache/", "~/.triton/")))
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME")

# The clock by which Linux sets the time of a file (CLOCK_REALTIME_COARSE in linux/time.h). The
# exact one is some milliseconds ahead of it.
CLOCK_OF_FILES = 5


class Files:
    """The user's files, which this process may not change from some time on.

    In ``folder``, that of the launch, files may change.
    """

    def __init__(self, torch: ModuleType, folder: str, report: Any) -> None:
        self._torch: Any = torch
        self._report = report
        caches = [os.path.abspath(os.environ[name]) for name in CACHES if os.environ.get(name)]  # noqa: PTH100
        self._free = (*FREE, *(f"{each}/" for each in (folder, *caches)))
        self._started = time.clock_gettime_ns(CLOCK_OF_FILES)
        self._is_kept = self._has_kept = False

    def install(self) -> None:
        """Replace functions early, because a script may import them by name."""
        self._do_nothing(self._torch, "save", self._is_older)
        for owner in _owners():
            for name in ("rename", "replace"):
                self._do_nothing(owner, name, lambda paths: self._is_older(paths[1:2]))

    def note_savers(self) -> None:
        """Replace the functions of packages that have been imported since."""
        for module, name in SAVERS:
            saver = getattr(sys.modules.get(module), name, None)
            if saver is not None and not hasattr(saver, "__wrapped__"):
                self._do_nothing(sys.modules[module], name, self._is_older)

    def keep(self) -> None:
        """Let no file change from now on."""
        self._is_kept = True
        for owner in _owners():
            for name in CHANGERS:
                if hasattr(owner, name):
                    self._do_nothing(owner, name)
        self.note_savers()
        opening = self._opening_nothing(builtins.open)
        for owner in (builtins, io, *_owners()[1:]):
            owner.open = opening
        sys.addaudithook(self._hear)

    def _do_nothing(
        self, owner: Any, name: str, never: Callable[[list[Any]], bool] = lambda paths: False
    ) -> None:
        """Let a function do nothing with a file that may not change, now or ever."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def keeping(*arguments: Any, **keywords: Any) -> Any:
            paths = [*arguments, *keywords.values()]
            if "dir_fd" not in keywords and (self._keeps(paths) or never(paths)):
                self._has_kept = True
                return None
            return original(*arguments, **keywords)

        setattr(owner, name, keeping)

    def _opening_nothing(self, original: Callable[..., Any]) -> Any:
        """Return an ``open`` that writes nowhere instead of to a file that may not change."""

        @functools.wraps(original)
        def opening(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            if set(mode) & set("wax") and self._keeps([file]):
                file, mode, self._has_kept = os.devnull, mode.replace("x", "w"), True
            return original(file, mode, *arguments, **keywords)

        return opening

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Wait before Python changes a file in another way, or starts a program, or sends."""
        paths = arguments if event in CHANGES else ()
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            paths = arguments[:1]
        sends = self._has_kept and _sends(event, arguments)
        if self._keeps(paths, sends=sends):
            self._report("would_write")
            while True:
                self._report.pause()

    def _keeps(self, paths: Iterable[Any], *, sends: bool = False) -> bool:
        """Return True if one of these may not change. Workers of loaders may do what they want."""
        is_concerned = self._is_kept and (sends or any(map(self._is_users, paths)))
        return is_concerned and self._torch.utils.data.get_worker_info() is None

    def _is_older(self, paths: list[Any]) -> bool:
        return any(self._is_users(path) and os.path.exists(path) for path in paths)  # noqa: PTH110

    def _is_users(self, path: Any) -> bool:
        # pathlib would be slow: the audit hook hears all that Python does.
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        whole = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - as above
        if whole.startswith(self._free) or "__pycache__" in whole:
            return False
        try:
            status = os.stat(whole)  # noqa: PTH116 - as above
        except OSError:
            return True
        # Such as a log that this launch writes.
        is_new = stat.S_ISREG(status.st_mode) and status.st_mtime_ns >= self._started
        return not is_new


def _owners() -> list[Any]:
    """Return ``os``, and in Python 3.10 what pathlib keeps some functions of it in."""
    accessor = vars(pathlib).get("_normal_accessor")
    return [os] if accessor is None else [os, accessor]


def _sends(event: str, arguments: tuple[Any, ...]) -> bool:
    """Return True before Python connects to a host, or sends a request."""
    is_host = event == "socket.connect" and isinstance(arguments[1], tuple)
    return is_host or event == "http.client.send"
