from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from batchfinder.launching.leftovers import Leftovers

# Its output is written while it runs.
SEARCH = """
import pathlib, sys, time
from batchfinder.launching.leftovers import Leftovers
leftovers = Leftovers(pathlib.Path())
pathlib.Path("made").write_text("x")
for stream in (sys.stdout, sys.stderr):
    print("a row", file=stream, flush=True)
while not pathlib.Path("log").exists():
    time.sleep(0.01)
text = leftovers.warning()
pathlib.Path("warning").write_text(text)
"""


def test_new_and_changed_files_are_named_once(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("x")
    leftovers = Leftovers(tmp_path)
    assert leftovers.warning() == ""
    (tmp_path / "new").write_text("x")
    os.utime(tmp_path / "old", ns=(1, 1))
    assert "left or changed 2 files: new, old." in leftovers.warning()
    assert leftovers.warning() == ""


def test_files_that_were_seen_to_be_saved_are_named_too(tmp_path: Path) -> None:
    leftovers = Leftovers(tmp_path)
    (tmp_path / "new").write_text("x")
    leftovers.saved += [str(tmp_path / "new"), str(tmp_path / ".hidden" / "a"), "/elsewhere/b"]
    assert "left or changed 3 files: .hidden/a, /elsewhere/b, new." in leftovers.warning()
    assert leftovers.warning() == ""


def test_files_behind_a_link_to_another_disk_are_named(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for each in (folder / "runs", elsewhere / "data"):
        each.mkdir(parents=True)
    (elsewhere / "ckpt.pt").write_text("x")
    (elsewhere / "again").symlink_to(elsewhere)
    (folder / "runs" / "out").symlink_to(elsewhere)
    (folder / "runs" / "up").symlink_to(folder)
    leftovers = Leftovers(folder)
    (elsewhere / "ckpt.pt").write_text("xx")
    os.utime(elsewhere / "ckpt.pt", ns=(1, 1))
    assert "left or changed 1 file: runs/out/ckpt.pt." in leftovers.warning()


def test_a_linked_data_set_does_not_hide_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchfinder.launching.leftovers.MOST_FILES", 3)
    folder, data = tmp_path / "folder", tmp_path / "data"
    folder.mkdir()
    data.mkdir()
    for number in range(5):
        (data / str(number)).write_text("x")
    (folder / "data").symlink_to(data)
    leftovers = Leftovers(folder)
    (folder / "new").write_text("x")
    assert "left or changed 1 file: new." in leftovers.warning()


@pytest.mark.parametrize("redirection", ["> log", "2> log", "| tee log"])
def test_the_log_of_the_search_is_not_left_behind(tmp_path: Path, redirection: str) -> None:
    search = f"{shlex.join([sys.executable, '-c', SEARCH])} {redirection}"
    subprocess.run(search, shell=True, cwd=tmp_path, check=True)
    assert "1 file: made." in (tmp_path / "warning").read_text()
    assert (tmp_path / "log").exists()
