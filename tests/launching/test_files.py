"""The hook keeps a script from changing files; in a process of its own, as it cannot be undone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from batchfinder.launching.launch import HOOK

# Runs each line in a fork, and prints the first word of what happened.
SCRIPT = """
import os, pathlib, shutil, socket, sqlite3, subprocess, sys, torch, types
sys.path.insert(0, sys.argv[1])
import files
class Report:
    def __call__(self, event): print(event, flush=True)
    def pause(self): os._exit(0)
own, log = pathlib.Path("own.txt"), pathlib.Path("log.txt")
free = f"{sys.argv[2]}/new.txt"
kept = files.Files(torch, sys.argv[2], Report())
kept.install()
torch.save({}, own)
torch.save({}, log)
assert log.stat().st_size
sys.modules["safetensors.torch"] = saver = types.ModuleType("safetensors.torch")
saver.serialize_file = lambda tensors, path, metadata=None: pathlib.Path(path).write_text("saved")
kept.note_savers()
saver.serialize_file({}, "own.txt")
saver.serialize_file({}, "log.txt")
for new in (f"{sys.argv[2]}/part.txt", f"{sys.argv[2]}/part_2.txt"):
    pathlib.Path(new).write_text("new")
os.replace(f"{sys.argv[2]}/part.txt", own)
shutil.move(f"{sys.argv[2]}/part_2.txt", log)
assert log.read_text() == "new"
own.rename("old.txt")
pathlib.Path("old.txt").rename(own)
log.write_text("of this launch")
kept.keep()
for line in sys.argv[3:]:
    if os.fork() == 0:
        exec(line)
        print("went_on", flush=True)
        os._exit(0)
    os.wait()
"""

SAVES = (
    "torch.save({}, own)",
    "torch.save({}, f='new.pt')",
    "own.write_text('changed')",
    "open('new.txt', 'x').close()",
    "open(own, mode='a').write('changed')",
    "own.touch()",
    "own.unlink()",
    "own.rename('new.txt')",
    "os.makedirs('a/b', exist_ok=True)",
    "torch.save({}, free); shutil.move(free, own)",
)
CHANGES_ANOTHER_WAY = (
    "os.open('new.txt', os.O_WRONLY | os.O_CREAT)",
    "open(own, 'r+')",
    "subprocess.run(['touch', 'new.txt'])",
    "sqlite3.connect('new.db')",
    "own.write_text('changed'); socket.create_connection(('127.0.0.1', 9))",
)
MAY = (
    "open(free, 'w').write('new')",
    "open(log, 'a').write(', and more')",
)


def test_no_file_of_the_users_changes(tmp_path: Path) -> None:
    own, free = tmp_path / "own", tmp_path / "free"
    own.mkdir()
    free.mkdir()
    (own / "own.txt").write_text("mine")
    before = (own / "own.txt").stat()
    lines = [*SAVES, *CHANGES_ANOTHER_WAY, *MAY]
    command = [sys.executable, "-c", SCRIPT, str(HOOK), str(free), *lines]
    output = subprocess.run(command, cwd=own, capture_output=True, text=True, check=True).stdout
    expected = ["went_on", "would_write", "went_on"]
    parts = zip(expected, (SAVES, CHANGES_ANOTHER_WAY, MAY), strict=True)
    told = {line: event for event, part in parts for line in part}
    assert dict(zip(lines, output.split(), strict=True)) == told
    assert sorted(each.name for each in own.iterdir()) == ["log.txt", "own.txt"]
    assert (own / "own.txt").read_text() == "mine"
    assert (own / "own.txt").stat().st_mtime_ns == before.st_mtime_ns
    assert (free / "new.txt").read_text() == "new"
    assert (own / "log.txt").read_text() == "of this launch, and more"
