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
    """Return each file in a folder with its time of change, in ns; None if there are too many."""
    found: dict[str, int] = {}
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and name[0] != "."]
        for name in names:
            file = os.path.relpath(os.path.join(path, name), folder)  # noqa: PTH118 - many
            try:
                found[file] = os.stat(os.path.join(path, name)).st_mtime_ns  # noqa: PTH116, PTH118
            except OSError:
                continue
        if len(found) > MOST_FILES:
            return None
    return found


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
