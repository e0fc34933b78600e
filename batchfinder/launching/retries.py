"""How often a command's processes flushed the allocator's cache, as the hook reports it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from batchfinder.launching.launch import hooked


@dataclass(frozen=True)
class Retries:
    """The reports of the processes of one command.

    Attributes:
        environment: the environment that brings the hook into the command.
    """

    environment: Mapping[str, str]
    _reports: Path

    def read(self) -> int | None:
        """Return the flushes of all processes; None while none has ended a step on a GPU."""
        totals: dict[int, int] = {}
        for line in self._reports.read_text(encoding="utf-8").splitlines():
            report = json.loads(line)
            if report["event"] == "retries":
                totals[report["pid"]] = report["total"]
        return sum(totals.values()) if totals else None


@contextmanager
def counted_retries() -> Iterator[Retries]:
    """Count the flushes of a command that is started in the block."""
    with TemporaryDirectory(prefix="batchfinder-") as folder:
        reports, order = Path(folder, "reports"), Path(folder, "order.json")
        reports.touch()
        order.write_text(json.dumps({"reports": str(reports)}), encoding="utf-8")
        yield Retries(hooked(order), reports)
