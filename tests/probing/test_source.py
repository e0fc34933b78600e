"""What reaches a worker of the setup that it is to load."""

from __future__ import annotations

from pathlib import Path

from processes import PATIENCE_SECONDS, order

from batchfinder.probing.process import WorkerProcess

TARGET = """
def build(**arguments):
    raise ValueError(repr(arguments))
"""


def test_arguments_are_those_that_were_read(tmp_path: Path) -> None:
    (tmp_path / "telling.py").write_text(TARGET)
    arguments = {"shape": (3, 4), "cfg": {1: 2}, "kinds": {5}, "raw": b"x", "rest": ...}
    worker = WorkerProcess(show_output=False)
    worker.send(order(f"{tmp_path}/telling.py:build", **arguments))
    answer = worker.receive(PATIENCE_SECONDS)
    worker.kill()
    assert answer["message"] == f"ValueError: {arguments!r}"
