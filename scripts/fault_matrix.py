"""What happens when things go wrong: every fault in a search of its own, each ending judged.

    python scripts/fault_matrix.py                       # all, about 15 minutes on 2 cores
    python scripts/fault_matrix.py --only "signals"      # those whose group or name has the text

A fault is survived if the search ends with a right answer or one clear error, and leaves no
process, no file and, in the user's own process, no changed state behind. Writes each ending as it
comes to scripts/results/faults.json, and ends with the table for the README.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_case import RESULTS, ROOT, markdown_table, save
from faults import ONCE, REFERENCE, Fault, all_faults

RESULT_FILE = RESULTS / "faults.json"
MARK = "BATCHFINDER_FAULT"
OPTIONS = ("--device", "cpu", "--memory-limit", "1GiB", "--json")
PATIENCE_SECONDS = 150
ENDING_SECONDS = 5

# What PyTorch's compiler keeps for its next run is no leftover of ours.
NOT_OURS = ("torchinductor_",)

SILENT_ENDS = (signal.SIGKILL, signal.SIGHUP)


def main() -> None:
    """Run the faults asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="part of a group or a name")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    options = parser.parse_args()
    # A shell starts what it runs in the background deaf to Ctrl-C, and that would be inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reference = run(Fault("reference", "no fault"), 0).answer
    if not reference or reference < 3:
        sys.exit(f"the search without a fault answered {reference}; nothing can be judged by that")
    print(f"the answer without a fault: {reference}", file=sys.stderr)
    results: dict[str, Any] = {"reference": reference, "faults": []}
    if options.only and options.output.exists():
        results = json.loads(options.output.read_text()) | {"reference": reference}
    for fault in all_faults(reference):
        if options.only not in f"{fault.group}: {fault.name}":
            continue
        ending = run(fault, reference)
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
        print(f"{fault.group}: {fault.name}: {verdict} ({told})", file=sys.stderr, flush=True)
        others = [known for known in results["faults"] if known["name"] != row["name"]]
        results["faults"] = [*others, row]
        save(options.output, results)
    print(table(results["faults"]))
    if not all(row["survived"] for row in results["faults"]):
        sys.exit(1)


@dataclass
class Ending:
    """How a search with a fault ended.

    Attributes:
        status: the exit status; None: it did not end in time.
        stdout, stderr: what it wrote.
        seconds: how long it took.
        orphans: the command lines of processes that it left behind.
        leftovers: the files that it left behind.
    """

    status: int | None
    stdout: str
    stderr: str
    seconds: float
    orphans: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    @property
    def report(self) -> dict[str, Any]:
        """The JSON object that it printed; empty if it printed none."""
        for line in self.stdout.splitlines():
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    report: dict[str, Any] = json.loads(line)
                    return report
        return {}

    @property
    def answer(self) -> int | None:
        """The batch size that it found."""
        return self.report.get("batch_size")

    @property
    def error(self) -> str:
        """The error that it told."""
        told = [line for line in self.stderr.splitlines() if line.startswith("Error: ")]
        return self.report.get("error") or "\n".join(told)


def run(fault: Fault, reference: int) -> Ending:
    """Search with a fault in the way, in a folder, with a home, that are empty before."""
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
                stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
            status = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            end_all(mark)
            stdout, stderr = process.communicate()
            status = None
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
    """The command to run."""
    arguments = {
        name: str(once) if value == ONCE else value for name, value in fault.arguments.items()
    }
    scripts = ROOT / "scripts"
    if fault.api:
        script = str(scripts / "fault_in_process.py")
        return [sys.executable, script, fault.api, json.dumps(arguments)]
    arguments = {"stage": "none", "deed": "", **arguments}
    words = [sys.executable, "-m", "batchfinder", "find", f"{scripts}/fault_targets.py:build"]
    words += [*OPTIONS, *fault.options]
    for name, value in arguments.items():
        words += ["--arg", f"{name}={value}"]
    if fault.redirect:
        words = ["bash", "-o", "pipefail", "-c", f'"$@" {fault.redirect}', "bash", *words]
    return [*fault.wrapper, *words]


@contextlib.contextmanager
def interference(fault: Fault, process: subprocess.Popen[bytes], once: Path) -> Iterator[None]:
    """What is done to the search from outside, once the deed has been done."""
    hog = None
    if fault.after_seconds:
        time.sleep(fault.after_seconds)
    elif ONCE in fault.arguments.values():
        doer = _wait_for_doer(process, once)
        if fault.kill == "worker":
            os.kill(doer, signal.SIGKILL)
        elif fault.kill == "spare":
            (spare,) = set(_children(process.pid)) - {doer}
            os.kill(spare, signal.SIGKILL)
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


def _wait_for_doer(process: subprocess.Popen[bytes], once: Path) -> int:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if once.exists() and once.read_text().endswith("\n"):
            return int(once.read_text())
        time.sleep(0.05)
    raise subprocess.TimeoutExpired("the deed", PATIENCE_SECONDS)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def end_all(mark: str) -> list[str]:
    """End the processes that carry the mark; those that do not end by themselves are told."""
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
        # Some end while we look.
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = words.decode(errors="replace").strip()
    return found


def judge(fault: Fault, ending: Ending, reference: int) -> list[str]:
    """What is wrong with an ending."""
    problems = [f"left a process: {orphan}" for orphan in ending.orphans]
    problems += [f"left a file: {leftover}" for leftover in ending.leftovers]
    problems += [f"changed: {name}" for name in ending.report.get("changed", [])]
    if str(ROOT / "batchfinder") + "/" in ending.stderr:
        problems.append("a traceback of ours: " + ending.stderr.strip().splitlines()[-1])
    if ending.status is None:
        problems.append(f"did not end within {PATIENCE_SECONDS} s")
    elif fault.send in SILENT_ENDS:
        pass  # there is nobody left to tell
    elif fault.redirect and not ending.stdout:
        problems += judge_silence(fault, ending)
    elif ending.answer is not None:
        problems += judge_answer(fault, ending, ending.answer, reference)
    elif fault.send and not fault.api:
        if ending.status not in (128 + fault.send, -fault.send):
            problems.append(f"exit status {ending.status} after {fault.send.name}")
    elif not fault.error:
        problems.append(f"no answer: {ending.error or ending.stderr.strip()[-200:]}")
    elif len(ending.error.splitlines()) != 1:
        problems.append(f"not one clear error: {ending.stderr.strip()[-200:]}")
    return problems


def judge_silence(fault: Fault, ending: Ending) -> list[str]:
    """What is wrong where nobody could read the answer."""
    if fault.answers is None:
        return ["told success"] if ending.status == 0 else []
    return [] if ending.status == 0 else [f"exit status {ending.status}"]


def judge_answer(fault: Fault, ending: Ending, answer: int, reference: int) -> list[str]:
    """What is wrong with an answer."""
    if fault.answers is None:
        failed = ending.report.get("status") == "failed" and ending.status == 1 and ending.error
        return [] if fault.error and failed else [f"answered {answer}, where there is no answer"]
    problems = []
    least, most = (reference if bound == REFERENCE else bound for bound in fault.answers)
    if not least <= answer <= most:
        problems.append(f"answered {answer}, not {least} to {most}")
    right = (130, 143) if fault.send else (3,) if answer == 0 else (0,)
    if not fault.api and ending.status not in right:
        problems.append(f"exit status {ending.status} beside an answer")
    return problems


def table(rows: list[dict[str, Any]]) -> str:
    """How many faults of each group were tried and survived."""
    lines: list[tuple[object, ...]] = []
    for group in dict.fromkeys(row["group"] for row in rows):
        survived = [row["survived"] for row in rows if row["group"] == group]
        lines.append((group, len(survived), sum(survived)))
    lines.append(("all", len(rows), sum(row["survived"] for row in rows)))
    return markdown_table(("faults", "tried", "survived"), lines)


if __name__ == "__main__":
    main()
