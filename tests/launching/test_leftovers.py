from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchfinder.launching.leftovers import Leftovers

SHOW = "from pathlib import Path; from batchfinder.launching.leftovers import files_in; " + (
    "print(files_in(Path('.')))"
)


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


def test_the_file_that_this_process_prints_to_is_not_left_behind(tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w") as out:
        subprocess.run([sys.executable, "-c", SHOW], cwd=tmp_path, stdout=out, check=True)
    assert (tmp_path / "out.txt").read_text() == "{}\n"
