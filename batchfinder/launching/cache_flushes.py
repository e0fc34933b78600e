"""How often a command's processes flushed the allocator's cache, as the hook reports it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from batchfinder.launching.launch import hooked, new_reports


class Flushes:
    """The flushes that the processes of one command report: its environment brings the hook."""

    def __init__(self, reports: IO[str], environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._reports = reports
        self._totals: dict[int, int] = {}  # by process

    def read(self) -> int | None:
        """Return the flushes of all processes; None while none has ended a step on a GPU."""
        for report in new_reports(self._reports):
            if report["event"] == "flushes":
                self._totals[report["pid"]] = report["total"]
        return sum(self._totals.values()) if self._totals else None


@contextmanager
def counted_flushes() -> Iterator[Flushes]:
    """Count the flushes of a command that is started in the block."""
    with TemporaryDirectory(prefix="batchfinder-") as folder:
        reports, order = Path(folder, "reports"), Path(folder, "order.json")
        reports.touch()
        order.write_text(json.dumps({"is_only_watched": True}), encoding="utf-8")
        with reports.open(encoding="utf-8") as file:
            yield Flushes(file, hooked(order))
