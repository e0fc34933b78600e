"""Run a search for each fault, and judge how it ended.

    python scripts/faults/matrix.py                       # all, about 40 minutes
    python scripts/faults/matrix.py --only "signals"      # those whose group or name has the text

A fault is survived if the search ends with a right answer or one clear error, and leaves no
process, no file and, in the user's own process, no changed state behind. Writes each ending as it
comes to scripts/results/faults.json, and prints the table of results at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command_faults import command_faults
from ending import Ending, judge
from faults import ONCE, ROOM_BYTES, SHORT, Fault, all_faults
from run_faults import run_command, run_faults

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from parts.case import RESULTS, ROOT, save
from rendering import faults as table

RESULT_FILE = RESULTS / "faults.json"
TERMINATED = 128 + signal.SIGTERM
MOST_DISTURBANCES = 3
MARK = "BATCHFINDER_FAULT"
OPTIONS = ("--device", "cpu", "--json")
ENDING_SECONDS = 5

# PyTorch's compiler keeps these files for its next run.
NOT_OURS = ("torchinductor_",)


def main() -> None:
    """Run the faults asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="part of a group or a name")
    parser.add_argument("--short", action="store_true", help="a handful, for the tests")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    options = parser.parse_args()
    hear_signals()
    reference = run_undisturbed(Fault("reference", "no fault")).answer
    if not reference or reference < 3:
        sys.exit(f"the search without a fault answered {reference}; nothing can be judged by that")
    print(f"the answer without a fault: {reference}", file=sys.stderr)
    results: dict[str, Any] = {"reference": reference, "faults": []}
    if options.only and options.output.exists():
        results = json.loads(options.output.read_text()) | {"reference": reference}
    results["not_tried"] = []
    for fault in (*all_faults(reference), *command_faults(reference), *run_faults()):
        title = f"{fault.group}: {fault.name}"
        if options.only and not any(part in title for part in options.only):
            continue
        if options.short and title not in SHORT:
            continue
        if fault.wrapper[:1] == ("unshare",) and not may_mount():
            results["not_tried"].append(f"{title}: needs the right to mount")
            continue
        ending = run_undisturbed(fault)
        problems = judge(fault, ending, reference)
        row = {
            "group": fault.group,
            "name": fault.name,
            "survived": not problems,
            "problems": problems,
            "exit_status": ending.status,
            "answer": ending.answer,
            "error": ending.error,
            "seconds": round(ending.seconds, 1),
        }
        verdict = "survived" if not problems else "; ".join(problems)
        told = f"answer {ending.answer}" if ending.answer is not None else ending.error
        print(f"{title}: {verdict} ({told})", file=sys.stderr, flush=True)
        known = {title_of(each): each for each in results["faults"]}
        results["faults"] = [*(known | {title: row}).values()]
        save(options.output, results)
    print(table(results["faults"]))
    if not all(row["survived"] for row in results["faults"]):
        sys.exit(1)


@functools.cache
def memory_limit() -> int:
    """Return the limit in bytes. A CUDA build of PyTorch needs half a GiB more than a CPU build."""
    code = "import batchfinder.probing.workers.serving, batchfinder.probing.devices.cpu as cpu; "
    code += "print(cpu.CpuDevice().held_bytes())"
    return int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT)) + ROOM_BYTES


def hear_signals() -> None:
    """Let searches receive every signal, and stop cleanly on SIGTERM.

    Background jobs of a shell ignore SIGINT, and nohup ignores SIGHUP; a search would inherit that.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))


def title_of(row: dict[str, Any]) -> str:
    """The group and the name of a fault."""
    return f"{row['group']}: {row['name']}"


def may_mount() -> bool:
    """Return whether /proc can be hidden, or a folder made read-only, for one process."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def run_undisturbed(fault: Fault) -> Ending:
    """Search with a fault, again if a SIGTERM came from outside.

    Administrators of a busy machine end processes by it.
    """
    ending = run(fault)
    for _ in range(MOST_DISTURBANCES):
        if fault.send is not None or ending.status not in (-signal.SIGTERM, TERMINATED):
            break
        print(f"{fault.name}: stopped from outside, again", file=sys.stderr)
        ending = run(fault)
    return ending


def run(fault: Fault) -> Ending:
    """Search with a fault, with an empty home and an empty working folder."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        places = {name: Path(folder) / name for name in ("home", "tmp", "work")}
        for place in places.values():
            place.mkdir()
        once = Path(folder) / "once"
        environment: dict[str, str | None] = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "HOME": str(places["home"]),
            "TMPDIR": str(places["tmp"]),
            "BATCHFINDER_CACHE": str(Path(folder) / "cache"),
            MARK: mark,
            **fault.environment,
        }
        started = time.monotonic()
        process = subprocess.Popen(
            command(fault, once),
            cwd=places["work"],
            env={key: value for key, value in environment.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        status: int | None
        try:
            with interference(fault, process, once):
                stdout, stderr = process.communicate(timeout=fault.patience_seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            end_all(mark)
            stdout, stderr = process.communicate()
            status = None
        except BaseException:  # this script was stopped: leave no process behind
            process.kill()
            end_all(mark)
            raise
        seconds = time.monotonic() - started
        orphans = end_all(mark)
        leftovers = [
            str(path.relative_to(folder))
            for place in places.values()
            for path in place.rglob("*")
            if not any(name in str(path) for name in NOT_OURS)
        ]
    texts = (text.decode(errors="replace") for text in (stdout, stderr))
    return Ending(status, *texts, seconds, orphans, leftovers)


def command(fault: Fault, once: Path) -> list[str]:
    """Return the command to run."""
    arguments = {
        name: str(once) if value == ONCE else value for name, value in fault.arguments.items()
    }
    here = Path(__file__).parent
    if fault.api == "run":
        return run_command(fault)
    if fault.api:
        script = str(here / "in_process.py")
        return [sys.executable, script, fault.api, json.dumps(arguments)]
    words = [sys.executable, "-m", "batchfinder", *fault.command, f"{here}/targets.py:build"]
    words += [*OPTIONS, "--memory-limit", str(memory_limit()), *fault.options]
    for name, value in arguments.items():
        words += ["--arg", f"{name}={value}"]
    if fault.redirect:
        words = ["bash", "-o", "pipefail", "-c", f'"$@" {fault.redirect}', "bash", *words]
    return [*fault.wrapper, *words]


@contextlib.contextmanager
def interference(fault: Fault, process: subprocess.Popen[bytes], once: Path) -> Iterator[None]:
    """Do to the search from outside what the fault asks for, after the deed."""
    hog = None
    if fault.after_seconds:
        time.sleep(fault.after_seconds)
    elif ONCE in fault.arguments.values():
        doer = _wait_for_doer(process, once, fault.patience_seconds)
        if fault.kill == "worker":
            os.kill(doer, signal.SIGKILL)
        elif fault.kill == "host":
            (host,) = set(_children(process.pid)) - {doer}
            os.kill(host, signal.SIGKILL)
    if fault.hog_bytes:
        hog = subprocess.Popen(
            [sys.executable, "-c", f"b = bytearray({fault.hog_bytes}); import time; time.sleep(3)"]
        )
    if fault.send is not None:
        process.send_signal(fault.send)
    try:
        yield
    finally:
        if hog is not None:
            hog.wait()


def _wait_for_doer(process: subprocess.Popen[bytes], once: Path, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if once.exists() and once.read_text().endswith("\n"):
            return int(once.read_text())
        time.sleep(0.05)
    raise subprocess.TimeoutExpired("the deed", seconds)


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            children += map(int, (task / "children").read_text().split())
    return children


def end_all(mark: str) -> list[str]:
    """End the processes that carry the mark, and return those that did not end by themselves."""
    deadline = time.monotonic() + ENDING_SECONDS
    while (alive := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(alive.values())


def _marked(mark: str) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # Some end meanwhile.
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = words.decode(errors="replace").strip()
    return found


if __name__ == "__main__":
    main()
