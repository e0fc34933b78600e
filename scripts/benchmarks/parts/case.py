"""One search, judged by training at its answer and above it: shared by the benchmarks.

Search and judge run in fresh processes. The judge, ``train_at.py``, knows nothing of batchfinder.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "scripts" / "benchmarks"
RESULTS = ROOT / "scripts" / "results"

# The benchmarks run from a checkout too, without an installed package.
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(RESULTS))
from rendering import markdown_table as markdown_table  # noqa: E402 - after the path

SURVIVAL_STEPS = 50

# The answer is tight if this many times the answer runs out of memory.
TIGHT = 1.2

# Time for a stopped process to report what it has found so far, in seconds.
STOP_SECONDS = 15


@dataclass(frozen=True)
class Case:
    """One search to run and to judge.

    Attributes:
        family: the kind of model.
        target: FILE.py:FUNCTION, relative to the repository.
        limit: such as ``"2GiB"``; ``"all"`` for no limit.
        device: such as ``"cpu"``.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
    """

    family: str
    target: str
    limit: str
    device: str = "cpu"
    precision: str = "fp32"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.family} {self.precision} {self.limit}"

    def find(self, deadline: float = math.inf, options: Sequence[str] = ()) -> dict[str, Any]:
        """What ``batchfinder find`` answers, with the whole command's ``wall_seconds``.

        Args:
            options: further ones of the command.
            deadline: in the seconds of ``time.monotonic``; the search is interrupted then.

        Returns:
            The object that ``--json`` prints; only ``error`` if it printed none.
        """
        command = ["-m", "batchfinder", "find", self.target, "--json", "--quiet", "--no-cache"]
        command += self._options()
        if self.limit != "all":
            command += ["--memory-limit", self.limit]
        command += options
        return run_for_json(command, deadline)

    def train(
        self,
        batch_size: int,
        memory_limit: str | None,
        *,
        seconds: float,
        deadline: float,
        steps: int = SURVIVAL_STEPS,
    ) -> dict[str, Any]:
        """What the judge says of a batch size.

        Args:
            batch_size: to train at.
            steps: how many.
            memory_limit: such as ``"2GiB"``; None: no limit.
            seconds: end early, without a failure, after so long.
            deadline: in the seconds of ``time.monotonic``; the process is stopped then.

        Returns:
            The object that ``train_at.py`` prints; only ``error`` if it printed none.
        """
        command = [
            "scripts/benchmarks/parts/train_at.py",
            self.target,
            str(batch_size),
            *self._options(),
        ]
        command += ["--steps", str(steps), "--seconds", str(seconds)]
        if memory_limit is not None:
            command += ["--memory-limit", memory_limit]
        return run_for_json(command, deadline)

    def estimate(self, overhead: str) -> dict[str, Any]:
        """What ``batchfinder estimate`` answers for a GPU with the case's limit as its memory.

        Args:
            overhead: what a process takes beside its tensors, such as ``"300MiB"``.

        Returns:
            The first estimate that ``--json`` prints; only ``error`` if it printed none.
        """
        command = ["-m", "batchfinder", "estimate", self.target, "--json"]
        command += ["--memory", self.limit, "--overhead", overhead, "--precision", self.precision]
        report = run_for_json(command, math.inf)
        found: dict[str, Any] = report["estimates"][0] if "estimates" in report else report
        return found

    def judge(
        self,
        answer: int,
        factor: float,
        memory_limit: str | None,
        *,
        limit_above: str | None = None,
        seconds: float = math.inf,
        deadline: float = math.inf,
    ) -> dict[str, Any]:
        """Train at the answer, which must survive, and at ``factor`` times it, which must not.

        Args:
            answer: of the search.
            factor: the multiple of it that is too large.
            memory_limit: for training at the answer; None: no limit.
            limit_above: for training above it; None: the same.
            seconds: after which each training ends early, without a failure.
            deadline: see :meth:`train`.

        Returns:
            What the judge said: ``survival`` and ``above``.
        """
        above = math.ceil(answer * factor)
        limits = {"seconds": seconds, "deadline": deadline}
        return {
            "survival": self.train(answer, memory_limit, **limits),
            "above": self.train(above, limit_above or memory_limit, **limits),
        }

    def _options(self) -> list[str]:
        return ["--device", self.device, "--precision", self.precision]


class DeviceDescription(NamedTuple):
    """What a benchmark has to know of the device.

    Attributes:
        name: of its kind.
        total_bytes: its memory; 0 for the CPU.
        context_bytes: what a process takes of it beside PyTorch's allocator, if no other
            process uses it; 0 for the CPU.
    """

    name: str
    total_bytes: int
    context_bytes: int


def describe_device(device: str) -> DeviceDescription:
    """Ask for it in another process, as this one is to take none of its memory."""
    if device == "cpu":
        return DeviceDescription("cpu", 0, 0)
    code = (
        "import json, sys, torch; device = torch.device(sys.argv[1]); "
        "free, total = torch.cuda.mem_get_info(device);"
        "print(json.dumps([torch.cuda.get_device_name(device), total, total - free]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, device], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        last_words = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        sys.exit(f"{device} cannot be used: {last_words}")
    return DeviceDescription(*json.loads(answer.stdout))


def survived(report: Mapping[str, Any]) -> bool:
    """Whether every step that was begun ran."""
    return report.get("outcome") == "survived" and report["steps"] > 0


def ran_out(report: Mapping[str, Any]) -> bool:
    """Return whether training ran out of memory."""
    return report.get("outcome") == "oom"


def judged(
    case: Case, found: Mapping[str, Any], *, seconds: float = math.inf, factor: float = TIGHT
) -> dict[str, Any]:
    """What was found, with what the judge says of it.

    Args:
        case: what was searched.
        found: the object that ``--json`` prints.
        seconds: after which each training of the judge ends early, without a failure.
        factor: the multiple of the answer that must not train.
    """
    row: dict[str, Any] = {
        "family": case.family,
        "limit": case.limit,
        "batch_size": found.get("batch_size", 0),
        "status": found.get("status", "error"),
        "survives": False,
        "is_tight": False,
    }
    if "error" in found:
        return row | {"error": found["error"]}
    probes = found["probes"]
    row |= {
        "probes": [[probe["batch_size"], probe["outcome"]] for probe in probes],
        "full_size_steps": round(found["cost_full_size_steps"], 2),
        "confirmed_steps": found["confirmed_steps"],
        "seconds": round(found["seconds"], 1),
        "wall_seconds": found["wall_seconds"],
        "notes": [probe["note"] for probe in probes if probe["note"]],
        "warnings": found["warnings"],
    }
    if row["batch_size"]:
        row |= case.judge(row["batch_size"], factor, case.limit, seconds=seconds)
        row |= {"survives": survived(row["survival"]), "is_tight": ran_out(row["above"])}
    return row


def save(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file at once, so that a later failure loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    unfinished.replace(path)


def run_for_json(arguments: Sequence[str], deadline: float) -> dict[str, Any]:
    """Run Python on the arguments in the repository, and read the object it prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": _join(str(ROOT), str(BENCHMARKS), os.environ.get("PYTHONPATH")),
    }
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        timeout = None if math.isinf(deadline) else max(0.0, deadline - started)
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            output, errors = process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
    lines = output.strip().splitlines()
    try:
        report: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    except json.JSONDecodeError:
        report = {}
    if not report:
        last_words = (errors.strip().splitlines() or ["no output"])[-1]
        report = {"error": f"exit code {process.returncode}: {last_words}"}
    return {**report, "wall_seconds": round(time.monotonic() - started, 1)}


def _join(*paths: str | None) -> str:
    return os.pathsep.join(path for path in paths if path)
