from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from batchfinder.launching.leftovers import files_in, left_behind

SHOW = "from pathlib import Path; from batchfinder.launching.leftovers import files_in; " + (
    "print(files_in(Path('.')))"
)


def test_new_and_changed_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("x")
    before = files_in(tmp_path)
    (tmp_path / "new").write_text("x")
    os.utime(tmp_path / "old", ns=(1, 1))
    assert "left or changed 2 files: new, old." in left_behind(before, files_in(tmp_path))
    assert left_behind(before, before) == ""


def test_the_file_that_this_process_prints_to_is_not_left_behind(tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w") as out:
        subprocess.run([sys.executable, "-c", SHOW], cwd=tmp_path, stdout=out, check=True)
    assert (tmp_path / "out.txt").read_text() == "{}\n"
