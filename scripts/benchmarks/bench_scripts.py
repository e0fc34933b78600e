"""Run ``batchfinder run`` on public training scripts, with no line of them changed.

    python scripts/benchmarks/bench_scripts.py FOLDER --get        # how to get the scripts
    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_scripts.py FOLDER
    python scripts/benchmarks/bench_scripts.py FOLDER --only nanoGPT --device cpu
    python scripts/benchmarks/bench_scripts.py FOLDER --cost

FOLDER has the checkouts, and ``data``, which ``parts/script_data.py`` makes. For each script
(``parts/script_list.py``): the answer; then the script at the answer for 50 steps, which must
survive, and at the next size up (5 %), which must not, under the same limit
(``parts/script_at.py``; who flushes the allocator's cache again and again does not survive). On the
CPU memory differs from run to run, so a size survives there if three trainings do. Each row is
written as it comes to scripts/results/scripts.json; rows that are there are not run again,
unless named by ``--only``. ``--cost`` shows instead what the hook costs: a start, and the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from parts.case import RESULTS, ROOT, SURVIVAL_STEPS, save
from parts.hook_cost import print_costs
from parts.script_list import SCRIPTS, Script

RESULT_FILE = RESULTS / "scripts.json"
JUDGE = Path(__file__).parent / "parts/script_at.py"
NEXT_SIZE = 1.05
TRAININGS = {"cpu": 3, "cuda": 1}  # of each judged size
SEARCH_SECONDS, JUDGE_SECONDS = 1800, 900
LAST_LINES = 12


def main() -> None:
    """Run the scripts asked for; exit with 1 unless every answer survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--get", action="store_true", help="show how to get scripts and data")
    parser.add_argument("--cost", action="store_true", help="measure what the hook costs")
    parser.add_argument("--only", action="append", metavar="NAME", help="or a part of it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.get:
        print("\n".join(how_to_get(folder)))
        return
    if options.cost:
        print_costs(folder)
        return
    rows = rows_in(options.output)
    for script in SCRIPTS:
        named = any(name.lower() in script.name.lower() for name in options.only or ())
        if not (named if options.only else script.name not in rows):
            continue
        row = row_of(script, folder, script.device or options.device)
        print(script.name, row, file=sys.stderr, flush=True)
        rows = rows_in(options.output) | {script.name: row}  # another run may have added its rows
        save(options.output, {each.name: rows[each.name] for each in SCRIPTS if each.name in rows})
    good = [name for name, row in rows.items() if row["survives"] and row["next_fails"]]
    print(f"{len(good)} of {len(rows)}: the answer survives, the next size up does not")
    sys.exit(len(good) < len(rows))


def rows_in(file: Path) -> dict[str, Any]:
    """Return the rows that are in a file; none if it does not exist."""
    return json.loads(file.read_text()) if file.exists() else {}


def how_to_get(folder: Path) -> list[str]:
    """Return the shell commands that fill the folder."""
    repositories = {script.repository: script.folder.split("/")[0] for script in SCRIPTS}
    clones = [
        f"git clone --depth 1 https://github.com/{repository} {folder / name}"
        for repository, name in repositories.items()
    ]
    return [*clones, f"python scripts/benchmarks/parts/script_data.py {folder / 'data'}"]


def row_of(script: Script, folder: Path, device: str) -> dict[str, Any]:
    """Search, and judge the answer."""
    for name, target in script.links.items():
        link = folder / script.folder / name
        if not link.exists():
            link.symlink_to((folder / "data" / target).resolve())
    found = launched(script, folder, device, SEARCH_SECONDS)
    row: dict[str, Any] = {
        "device": device,
        "gib": script.gib,
        "lines_changed": 0,
        "batch_size": found.get("batch_size", 0),
        "launches": found.get("launches", 0),
        "seconds": found["seconds"],
        "survives": False,
        "next_fails": False,
    }
    if not row["batch_size"]:
        return row | {"error": found["error"]}
    answer = row["batch_size"]
    facts = ("batch_size", "outcome", "steps", "note")
    row["probes"] = [[probe[fact] for fact in facts] for probe in found["probes"]]
    row["warnings"] = found["warnings"]
    row["command"] = found["command"].replace(str(folder), "FOLDER")
    row["next_size"] = max(answer + 1, math.ceil(answer * NEXT_SIZE))
    row["survival"] = judged(script, folder, device, answer)
    row["survives"] = survived(row["survival"])
    row["next"] = judged(script, folder, device, row["next_size"])
    row["next_fails"] = row["next"]["outcome"] == "oom" or thrashes(row["next"])
    return row


def survived(judgment: dict[str, Any]) -> bool:
    """Return True if every step ran, without flushing the allocator's cache again and again."""
    return judgment["outcome"] == "survived" and not thrashes(judgment)


def thrashes(judgment: dict[str, Any]) -> bool:
    """Return True if more than a tenth of the steps flushed the allocator's cache."""
    return int(judgment.get("flushes", 0)) > SURVIVAL_STEPS / 10


def launched(script: Script, folder: Path, device: str, seconds: float) -> dict[str, Any]:
    """Run ``batchfinder run`` on a script."""
    tool = ["-m", "batchfinder", "run", "--no-cache", "--json", "--device", device]
    options = ["--memory-limit", f"{script.gib}GiB", *script.options]
    return printed([*tool, *options, *words_of(script, folder)], folder / script.folder, seconds)


def judged(script: Script, folder: Path, device: str, size: int) -> dict[str, Any]:
    """Train at one size until a training does not survive, or enough do. Return the last one."""
    judgments: list[dict[str, Any]] = []
    while len(judgments) < TRAININGS[device] and all(map(survived, judgments)):
        judgments.append(trained(script, folder, device, size))
    return {**judgments[-1], "trainings": len(judgments)}


def trained(script: Script, folder: Path, device: str, size: int) -> dict[str, Any]:
    """Train with a script at one size."""
    tool = [str(JUDGE), str(size), "--device", device, "--gib", str(script.gib)]
    limits = ["--steps", str(SURVIVAL_STEPS), "--seconds", str(JUDGE_SECONDS)]
    where, seconds = folder / script.folder, 2 * JUDGE_SECONDS
    report = printed([*tool, *limits, *words_of(script, folder)], where, seconds)
    if "outcome" not in report:
        return {"outcome": "error", "reason": report["error"]}
    return {name: report[name] for name in ("outcome", "steps", "flushes", "reason")}


def words_of(script: Script, folder: Path) -> list[str]:
    """Return the script's variables as options, and its command."""
    options = []
    for name, value in script.environment.items():
        if name == "PYTHONPATH" and os.environ.get("PYTHONPATH"):
            value = f"{value}:{os.environ['PYTHONPATH']}"
        options += ["--env", f"{name}={value}"]
    return [*options, "--", *shlex.split(script.command.replace("{data}", str(folder / "data")))]


def printed(arguments: list[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Run Python in a folder, and return what it prints as JSON, with its exit status and time."""
    started = time.monotonic()
    try:
        run = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {seconds:g} s", "exit_status": None, "seconds": seconds}
    report: dict[str, Any] = {}
    if run.stdout.strip():
        report = json.loads(run.stdout)
    report |= {"exit_status": run.returncode, "seconds": round(time.monotonic() - started, 1)}
    if run.returncode:
        report["error"] = "\n".join(run.stderr.splitlines()[-LAST_LINES:])
    return report


if __name__ == "__main__":
    main()
