"""Find files that launches leave in the folder that they run in."""

from __future__ import annotations

import os
from pathlib import Path

# Folders that are skipped, like hidden ones: they have too many files to compare.
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}
# With more files the folder probably holds data sets, and comparing them takes too long.
MOST_FILES = 20_000
_SHOWN = 5


def files_in(folder: Path) -> dict[str, int] | None:
    """Return each file in a folder with its time of change, in ns; None if there are too many.

    Files that this process itself writes its output to are left out.
    """
    found: dict[str, int] = {}
    own = {_identity(os.fstat(number)) for number in _open_outputs()}
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and name[0] != "."]
        for name in names:
            file = os.path.relpath(os.path.join(path, name), folder)  # noqa: PTH118 - many
            try:
                status = os.stat(os.path.join(path, name))  # noqa: PTH116, PTH118
            except OSError:
                continue
            if _identity(status) not in own:
                found[file] = status.st_mtime_ns
        if len(found) > MOST_FILES:
            return None
    return found


def _open_outputs() -> list[int]:
    """Return the file descriptors of standard output and standard error that are open."""
    return [number for number in (1, 2) if os.path.exists(f"/dev/fd/{number}")]  # noqa: PTH110


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def left_behind(before: dict[str, int] | None, after: dict[str, int] | None) -> str:
    """Return a warning that names new and changed files; "" if there are none."""
    if before is None or after is None:
        return ""
    new = sorted(name for name, changed in after.items() if before.get(name) != changed)
    if not new:
        return ""
    shown = ", ".join(new[:_SHOWN]) + (" ..." if len(new) > _SHOWN else "")
    files = "file" if len(new) == 1 else "files"
    return f"the launches left or changed {len(new)} {files}: {shown}. Try {{scratch}} for outputs"
