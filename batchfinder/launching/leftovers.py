"""Find files that launches leave in the folder that they run in."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from batchfinder.units import count

# Folders that are skipped, like hidden ones: they have too many files to compare.
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}
# With more files the folder probably holds data sets, and comparing them takes too long.
MOST_FILES = 20_000
_SHOWN = 5


class Leftovers:
    """The files that are made or changed in a folder from now on, and others that scripts saved.

    Attributes:
        saved: paths of files that scripts were seen to save, wherever they are.
    """

    def __init__(self, folder: Path) -> None:
        self.saved: list[str] = []
        self._folder = folder
        self._before = files_in(folder)

    def warning(self) -> str:
        """Return a warning that names new and changed files, each once; "" if there are none."""
        before, self._before = self._before, files_in(self._folder)
        found = set(map(self._named, self.saved))
        self.saved = []
        if before is not None and self._before is not None:
            found |= {name for name, time in self._before.items() if before.get(name) != time}
        if not found:
            return ""
        written = _still_written()
        new = sorted(n for n in found if os.path.realpath(self._folder / n) not in written)
        if not new:
            return ""
        shown = ", ".join(new[:_SHOWN]) + (" ..." if len(new) > _SHOWN else "")
        files = count(len(new), "file")
        return f"the launches left or changed {files}: {shown}. Try {{scratch}} for outputs"

    def _named(self, path: str) -> str:
        is_inside = Path(path).is_relative_to(self._folder)
        return os.path.relpath(path, self._folder) if is_inside else path


def files_in(folder: Path) -> dict[str, int] | None:
    """Return each file in a folder with its time of change, in ns; None if there are too many.

    Links to folders elsewhere are followed, because outputs often go to another disk; not if they
    have too many files.
    """
    links: list[Path] = []
    found = _walk(folder, links)
    whole = folder.resolve()
    for link in links:
        target = link.resolve()
        if found is not None and not (target.is_relative_to(whole) or whole.is_relative_to(target)):
            linked = _walk(link, []) or {}
            found |= {f"{link.relative_to(folder)}/{file}": time for file, time in linked.items()}
    return found


def _walk(folder: Path, links: list[Path]) -> dict[str, int] | None:
    """Do the same, without following links to folders, which are added to the list."""
    found: dict[str, int] = {}
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and name[0] != "."]
        links += [place for place in map(Path(path).joinpath, folders) if place.is_symlink()]
        for name in names:
            try:
                status = os.stat(f"{path}/{name}")  # noqa: PTH116 - many
            except OSError:
                continue
            found[os.path.relpath(f"{path}/{name}", folder)] = status.st_mtime_ns
        if len(found) > MOST_FILES:
            return None
    return found


def _still_written() -> set[str]:
    """Return the files that running processes write. No launch does: all of them have ended.

    Such a file is the log of this search, also behind ``| tee log.txt``.
    """
    written = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it was closed, or is another user's
            if descriptor.lstat().st_mode & stat.S_IWUSR:
                written.add(str(descriptor.readlink()))
    return written
