"""The ending of a search with a fault in it, and whether it is right."""

from __future__ import annotations

import contextlib
import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import REFERENCE, Fault

PACKAGE = Path(__file__).resolve().parents[2] / "batchfinder"

STATUS_AFTER = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
"""The exit status that each signal causes; a closed terminal (SIGHUP) ends a command as SIGTERM."""


@dataclass
class Ending:
    """How a search with a fault ended.

    Attributes:
        status: the exit status; None: it did not end in time.
        stdout: its standard output.
        stderr: its standard error.
        seconds: its duration.
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
        """The JSON object on stdout; empty if there is none."""
        for line in self.stdout.splitlines():
            if line.startswith("{"):
                with contextlib.suppress(ValueError):
                    report: dict[str, Any] = json.loads(line)
                    return report
        return {}

    @property
    def answer(self) -> int | None:
        """The batch size found; of a study, that of its last row."""
        report = self.report
        for several in ("comparisons", "rows"):
            report = report[several][-1] if several in report else report
        return report.get("batch_size")

    @property
    def error(self) -> str:
        """The error shown."""
        told = [line for line in self.stderr.splitlines() if line.startswith("Error: ")]
        return self.report.get("error") or "\n".join(told)


def judge(fault: Fault, ending: Ending, reference: int) -> list[str]:
    """Return what is wrong with an ending."""
    problems = [f"left a process: {orphan}" for orphan in ending.orphans]
    problems += [f"left a file: {leftover}" for leftover in ending.leftovers]
    problems += [f"changed: {name}" for name in ending.report.get("changed", [])]
    if f"{PACKAGE}/" in ending.stderr:
        problems.append("a traceback of ours: " + ending.stderr.strip().splitlines()[-1])
    if ending.status is None:
        problems.append(f"did not end within {fault.patience_seconds:g} s")
    elif fault.send == signal.SIGKILL:
        pass  # no process is left that could report it
    elif fault.redirect and not ending.stdout:
        problems += judge_silence(fault, ending)
    elif ending.answer is not None:
        problems += judge_answer(fault, ending, ending.answer, reference)
    elif fault.send and fault.api in ("", "run"):
        if ending.status not in (STATUS_AFTER[fault.send], -fault.send):
            problems.append(f"exit status {ending.status} after {fault.send.name}")
    elif not fault.error:
        problems.append(f"no answer: {ending.error or ending.stderr.strip()[-200:]}")
    elif len(ending.error.splitlines()) != 1:
        problems.append(f"not one clear error: {ending.stderr.strip()[-200:]}")
    return problems


def judge_silence(fault: Fault, ending: Ending) -> list[str]:
    """Return what is wrong where the answer could not be read."""
    if fault.answers is None:
        return ["reported success"] if ending.status == 0 else []
    return [] if ending.status == 0 else [f"exit status {ending.status}"]


def judge_answer(fault: Fault, ending: Ending, answer: int, reference: int) -> list[str]:
    """Return what is wrong with an answer."""
    if fault.answers is None:
        failed = ending.report.get("status") == "failed" and ending.status == 1 and ending.error
        return [] if fault.error and failed else [f"answered {answer}, where there is no answer"]
    problems = []
    least, most = (reference if bound == REFERENCE else bound for bound in fault.answers)
    if not least <= answer <= most:
        problems.append(f"answered {answer}, not {least} to {most}")
    right = STATUS_AFTER[fault.send] if fault.send else 3 if answer == 0 else 0
    if fault.api in ("", "run") and ending.status != right:
        problems.append(f"exit status {ending.status} beside an answer")
    return problems
