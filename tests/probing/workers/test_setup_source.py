"""What reaches a worker: the setup that it is to load, and nothing of the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS, order

from batchfinder.probing.workers.process import WorkerProcess

TARGET = """
def build(**arguments):
    raise ValueError(repr(arguments))
"""


@pytest.mark.usefixtures("warm_workers")
def test_arguments_are_those_that_were_read(tmp_path: Path) -> None:
    (tmp_path / "telling.py").write_text(TARGET)
    arguments = {"shape": (3, 4), "cfg": {1: 2}, "kinds": {5}, "raw": b"x", "rest": ...}
    worker = WorkerProcess(show_output=False)
    worker.send(order(f"{tmp_path}/telling.py:build", **arguments))
    answer = worker.receive(PATIENCE_SECONDS)
    worker.kill()
    assert answer["message"] == f"ValueError: {arguments!r}"


def test_files_of_the_current_folder_do_not_stand_in_for_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "queue", "torch"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not the one that was meant')")
    (tmp_path / "within").mkdir()
    (tmp_path / "within" / "telling.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    worker = WorkerProcess(show_output=False)
    worker.send(order("within/telling.py:build", width=3))
    answer = worker.receive(PATIENCE_SECONDS)
    worker.kill()
    assert answer["message"] == "ValueError: {'width': 3}"
