"""The answers of earlier searches, in one SQLite file for all processes of a user.

The file is kept in SQLite's default journal mode, because its write-ahead log does not work on the
network disks that home folders of clusters are on (https://www.sqlite.org/wal.html). A search makes
only one short transaction.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchfinder.errors import CacheError
from batchfinder.results.remembered import Remembered

if TYPE_CHECKING:
    from sqlite3 import Connection

# The number changes with the columns.
FILE = "answers-1.sqlite3"

# The most answers that are kept, of about 5 KB each. Older ones are removed.
MOST_ANSWERS = 1000

# How long to wait for other processes. Each holds the file for milliseconds.
BUSY_SECONDS = 10.0

_COLUMNS = "key, command, saved, facts, result"
_TABLE = """CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, command TEXT, saved REAL, facts TEXT, result TEXT
)"""
_HAS_TABLE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'answers'"
_PRUNE = """DELETE FROM answers WHERE key NOT IN (
    SELECT key FROM answers ORDER BY saved DESC LIMIT ?
)"""


@dataclass(frozen=True)
class CachedAnswer:
    """A remembered answer: one row of the file."""

    key: str
    command: str
    saved: float  # in seconds since 1970
    facts: Mapping[str, Any]  # everything that the answer depends on
    result: Mapping[str, Any]
    when: str  # the local time, in ISO 8601

    def remembered(self) -> Remembered | None:
        """Return the answer with its evidence; None if the row holds no such answer."""
        try:
            return Remembered.of(self.result, self.when, self.facts.get("budget_bytes"))
        except (KeyError, ValueError, TypeError, AttributeError, StopIteration):
            return None


class AnswerCache:
    """Keep answers by the key of what they depend on. Many processes may use it at once.

    A ``CacheError`` is raised if the file cannot be read or written.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = AnswerCache(Path(folder))
        ...     cache.remember("1f", "find train.py:build", {}, {"batch_size": 64})
        ...     cache.recall("1f").result["batch_size"]
        64
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or cache_folder()) / FILE

    def recall(self, key: str) -> CachedAnswer | None:
        """Return the answer with a key; None if there is none."""
        return next(iter(self._select("WHERE key = ?", [key])), None)

    def answers(self, start_of_key: str = "") -> list[CachedAnswer]:
        """Return the answers whose key starts with a text, the newest first."""
        where = "WHERE substr(key, 1, ?) = ? ORDER BY saved DESC"
        return self._select(where, [len(start_of_key), start_of_key])

    def remember(
        self, key: str, command: str, facts: Mapping[str, Any], result: Mapping[str, Any]
    ) -> None:
        """Save an answer, in place of an older one with the same key."""
        row = [key, command, time.time(), json.dumps(facts), json.dumps(result)]
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_TABLE)
            connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", row)
            connection.execute(_PRUNE, [MOST_ANSWERS])
            connection.execute("COMMIT")

    def clear(self) -> int:
        """Remove all answers, and a file that is damaged. Return how many there were."""
        try:
            count = len(self.answers())
            if count:
                # Keep the file: another process may be about to write to it.
                with self._open() as connection:
                    connection.execute("DELETE FROM answers")
        except CacheError as refusal:
            if not refusal.is_damaged:
                raise
            try:
                self.path.unlink()
            except OSError as error:
                raise _unusable(self.path, error) from None
            return 0
        return count

    def _select(self, where: str, values: Sequence[Any]) -> list[CachedAnswer]:
        # Unlike the method of a path, this is False for a folder that may not be searched.
        if not os.path.exists(self.path):  # noqa: PTH110
            return []
        with self._open() as connection:
            if not connection.execute(_HAS_TABLE).fetchone():
                return []
            rows = connection.execute(f"SELECT {_COLUMNS} FROM answers {where}", values).fetchall()
        try:
            return [
                CachedAnswer(
                    key,
                    command,
                    float(saved),
                    dict(json.loads(facts)),
                    dict(json.loads(result)),
                    _local_time(float(saved)),
                )
                for key, command, saved, facts, result in rows
            ]
        except (ValueError, TypeError, OverflowError, OSError) as error:
            raise _unusable(self.path, error, is_damaged=True) from None

    @contextmanager
    def _open(self) -> Iterator[Connection]:
        try:
            import sqlite3
        except ImportError:  # a Python that was built without it
            raise CacheError("this Python has no sqlite3. Try --no-cache") from None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Without an isolation level, transactions begin only at an explicit BEGIN.
            connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                yield connection
            finally:
                connection.close()
        except (sqlite3.Error, OSError) as error:
            # Subclasses mean a full disk, a lock, or a file that may not be written: no damage.
            is_damaged = type(error) is sqlite3.DatabaseError
            raise _unusable(self.path, error, is_damaged=is_damaged) from None


def _local_time(saved: float) -> str:
    return datetime.fromtimestamp(saved, timezone.utc).astimezone().isoformat(" ", "minutes")


def _unusable(path: Path, error: Exception, *, is_damaged: bool = False) -> CacheError:
    way_out = "batchfinder cache clear" if is_damaged else "BATCHFINDER_CACHE=/another/folder"
    return CacheError(
        f"the remembered answers in {path} cannot be used ({error}). Try {way_out}, or --no-cache",
        is_damaged=is_damaged,
    )


def cache_folder() -> Path:
    """Return the folder that BATCHFINDER_CACHE names, or the platform's usual one of this user."""
    if chosen := os.environ.get("BATCHFINDER_CACHE"):
        return Path(chosen)
    try:
        return _cache_folder_of_user() / "batchfinder"
    except RuntimeError:  # a user in a container may have no home folder
        return Path(tempfile.gettempdir()) / "batchfinder"


def _cache_folder_of_user() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
