"""Check the answers of searches on real set-ups in training loops of their own, and time them.

    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_setups.py    # about two hours
    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_setups.py --only clip-80
    python scripts/benchmarks/bench_setups.py --device cpu
    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_setups.py --add expandable
    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_setups.py --judge
    scripts/counting_cuda/run.sh python scripts/benchmarks/bench_setups.py --add long
    python scripts/benchmarks/bench_setups.py --table

For each set-up: the answer by ``batchfinder find``; then the set-up's own loop (``setups/``), at
module level, in a fresh process that may use no more memory than the search: 30 steps at the
answer, which must survive, and at the next size up (2 %), which must not. Where steps differ, it
trains in four orders of the data: each must survive, one must not. Beside it, doubling and
bisection in the same loop, in one process; and 30 steps at their answer, in a fresh one. Writes
each row as it comes to scripts/results/setups.json; rows that are there are not run again, unless
named by ``--only``. ``--judge`` trains again at the answers that are there, and ``--add long`` for
1000 steps in one more order, where steps differ. ``--add expandable`` adds to each row what a
search under ``expandable_segments:True`` answers, and what a search without it said of that.

CUDA set-ups run on the counting runtime (kernels do nothing, memory is counted by PyTorch's own
allocator); they need transformers, timm, diffusers, peft, trl and pytorch-lightning.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from parts.case import RESULTS, markdown_table, ran_out, run_for_json, save, survived
from parts.setup_list import SETUPS, Setup

FOLDER = "scripts/benchmarks/setups"
RESULT_FILE = RESULTS / "setups.json"
NEXT_SIZE = 1.02
GIB = 2**30

# A search is stopped after so many seconds, a bisection or a training after so many.
SEARCH_SECONDS = 150
TRAINING_SECONDS = 240

# A long training: its steps, the seed of its order of the data, and when it is stopped.
LONG_STEPS, LONG_SEED, LONG_SECONDS = 1000, 11, 600


def main() -> None:
    """Run the set-ups asked for; exit with 1 unless every answer survives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="or the start of it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row after these")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    parser.add_argument("--add", choices=("expandable", "long"), help="to the rows that are there")
    parser.add_argument("--judge", action="store_true", help="the answers that are there")
    parser.add_argument("--table", action="store_true", help="of the rows that are there")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    if options.output.exists():
        rows = json.loads(options.output.read_text())
    started = time.monotonic()
    for setup in () if options.table else SETUPS:
        named = any(setup.name.startswith(name) for name in options.only or ())
        if setup.device != options.device or not (named if options.only else True):
            continue
        row = rows.get(setup.name, {})
        done = bool(row)
        if options.judge or options.add:
            done = not row.get("batch_size") or options.add in row
            done |= options.add == "long" and setup.orders == 1
        if (done and not named) or time.monotonic() - started > options.seconds:
            continue
        if options.add:
            added = expandable_of(setup) if options.add == "expandable" else lasting(setup, row)
            rows[setup.name] = row | {options.add: added}
        elif options.judge:
            rows[setup.name] = judged(setup, row, row)
        else:
            rows[setup.name] = row_of(setup, row)
        print(setup.name, rows[setup.name], file=sys.stderr, flush=True)
        save(options.output, {each.name: rows[each.name] for each in SETUPS if each.name in rows})
    rows = {each.name: rows[each.name] for each in SETUPS if each.name in rows}
    print(table(rows), summary(rows), sep="\n\n")
    sys.exit(not all(row["survives"] for row in rows.values()))


def row_of(setup: Setup, before: dict[str, Any]) -> dict[str, Any]:
    """Search, judge, and let doubling and bisection search.

    Args:
        setup: what is trained.
        before: an earlier row. What its loop did under the same budget is taken over: bisection,
            and training at the same sizes.
    """
    os.environ["COUNTING_CUDA_TOTAL"] = str(int(setup.gib * GIB))
    row: dict[str, Any] = {"kind": setup.kind, "device": setup.device, "gib": setup.gib}
    found = timed(find_command(setup), SEARCH_SECONDS)
    row |= {"batch_size": found.get("batch_size", 0), "status": found.get("status", "error")}
    row |= {"seconds": found["wall_seconds"], "cpu_seconds": found["cpu_seconds"]}
    row |= {"survives": False, "is_tight": False}
    if not row["batch_size"]:
        return row | {"error": found.get("error", "")}
    samples = sum(probe["samples"] for probe in found["probes"])
    row |= {
        "budget_bytes": found["budget_bytes"],
        "probes": [[p["batch_size"], p["outcome"], p["steps"]] for p in found["probes"]],
        "full_size_steps": round(samples / row["batch_size"], 2),
        "parts": found.get("seconds_by_part"),
    }
    known = before if before.get("budget_bytes") == row["budget_bytes"] else {}
    if "bisection" in known:
        row["bisection"] = known["bisection"]
    else:
        row["bisection"] = bisection = trained(setup, row["budget_bytes"], "--bisect")
        if bisection.get("batch_size"):
            steps = bisection["samples"] / bisection["batch_size"]
            bisection["full_size_steps"] = round(steps, 2)
    return judged(setup, row, known)


def judged(setup: Setup, row: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Train at the answer, at the next size up, and at the answer of bisection.

    Args:
        setup: what is trained.
        row: its row, with both answers.
        known: an earlier row of the same budget. What trained at the same sizes is taken over.
    """
    os.environ["COUNTING_CUDA_TOTAL"] = str(int(setup.gib * GIB))
    answer = row["batch_size"]
    above = max(answer + 1, math.ceil(answer * NEXT_SIZE))
    sizes = {"survival": answer, "above": above}
    if row["bisection"].get("batch_size"):
        sizes["bisection_survival"] = row["bisection"]["batch_size"]
    done = [known[part] for part in sizes if is_judged(setup, known.get(part, {}))]
    reports = {report["batch_size"]: report for report in done}
    for part, size in sizes.items():
        if size not in reports:
            reports[size] = trained_at(setup, row["budget_bytes"], size)
        row[part] = reports[size]
    return row | {"survives": survived(row["survival"]), "is_tight": is_refused(row["above"])}


def is_judged(setup: Setup, report: dict[str, Any]) -> bool:
    """Whether a report says all that is asked: a failure, or as many orders as survive today."""
    return bool(report) and (not survived(report) or report.get("orders", 1) >= setup.orders)


def is_refused(above: dict[str, Any]) -> bool:
    """Whether a size does not train: it runs out of memory, or PyTorch cannot run it at all."""
    return above.get("outcome") in ("oom", "error")


def expandable_of(setup: Setup) -> dict[str, Any]:
    """Search without the setting, and with it; judge the second answer."""
    os.environ["COUNTING_CUDA_TOTAL"] = str(int(setup.gib * GIB))
    plain = timed(find_command(setup), SEARCH_SECONDS)
    told = re.search(
        r"expandable_segments:True would fit a batch of about (\d+)",
        " ".join(plain.get("warnings", ())),
    )
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    try:
        found = timed(find_command(setup), SEARCH_SECONDS)
        answer = found.get("batch_size", 0)
        judgement = trained_at(setup, found.get("budget_bytes", 0), answer)
    finally:
        del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
    return {
        "without": plain.get("batch_size", 0),
        "told": int(told[1]) if told else None,
        "batch_size": answer,
        "survives": survived(judgement),
    }


def find_command(setup: Setup) -> list[str]:
    """Return the arguments of Python that search."""
    command = ["-m", "batchfinder", "find", f"{FOLDER}/{setup.file}:target", "--json"]
    command += ["--quiet", "--no-cache"]
    command += ["--device", setup.device, *(["--precision", "bf16"] if setup.in_bf16 else [])]
    for name, value in setup.arguments.items():
        command += ["--arg", f"{name}={value}"]
    if setup.device == "cpu":
        command += ["--memory-limit", f"{setup.gib}GiB"]
    return command


def trained_at(setup: Setup, budget: int, batch_size: int) -> dict[str, Any]:
    """What a fresh process says that trains at one size: the first order that fails, or the last.

    Where steps differ, each order of the data is a training of its own.
    """
    flushing = 0
    for order in range(setup.orders):
        options = "--batch-size", str(batch_size), "--seed", str(order)
        report = trained(setup, budget, *options) | {"orders": order + 1}
        report["flushing_steps"] = flushing = max(flushing, report.get("flushing_steps", 0))
        if not survived(report):
            break
    return report


def lasting(setup: Setup, row: dict[str, Any]) -> dict[str, Any]:
    """What a fresh process says that trains at the answer for much longer."""
    os.environ["COUNTING_CUDA_TOTAL"] = str(int(setup.gib * GIB))
    options = "--batch-size", str(row["batch_size"]), "--seed", str(LONG_SEED)
    steps = "--steps", str(LONG_STEPS)
    return trained(setup, row["budget_bytes"], *options, *steps, seconds=LONG_SECONDS)


def trained(
    setup: Setup, budget: int, *options: str, seconds: float = TRAINING_SECONDS
) -> dict[str, Any]:
    """What a fresh process says that trains in the set-up's own loop."""
    command = [f"{FOLDER}/train_setup.py", setup.file, "--device", setup.device, *options]
    command += ["--budget", str(budget), "--arguments", json.dumps(dict(setup.arguments))]
    if setup.in_bf16:
        command.append("--bf16")
    return timed(command, seconds)


def timed(command: list[str], seconds: float) -> dict[str, Any]:
    """The object that a command prints, with the seconds of CPU that it used."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = run_for_json(command, time.monotonic() + seconds)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**report, "cpu_seconds": round(used, 1)}


def table(rows: dict[str, Any]) -> str:
    """One line a set-up."""
    header = ["set-up", "kind", "answer", "30 steps", "2 % more", "full-size steps", "theirs"]
    lines = [
        [
            *(name, row["kind"], row["batch_size"] or row["error"]),
            *(verdict(row.get(part, {})) for part in ("survival", "above")),
            row.get("full_size_steps", "-"),
            row.get("bisection", {}).get("full_size_steps", "-"),
            f"{row['seconds']:.0f} s",
            f"{row['bisection']['wall_seconds']:.0f} s" if "bisection" in row else "-",
            row.get("bisection", {}).get("batch_size", "-"),
        ]
        for name, row in rows.items()
    ]
    return markdown_table([*header, "time", "theirs", "their answer"], lines)


def verdict(report: dict[str, Any]) -> str:
    """How a training went, in a word or two."""
    if survived(report):
        return "survives"
    if ran_out(report):
        return f"dies in step {report['steps'] + 1}"
    return str(report.get("reason") or report.get("error") or "-")[:60]


def summary(rows: dict[str, Any]) -> str:
    """The lines that the measures ask for, for each device."""
    return "\n".join(
        summary_of(device, [row for row in rows.values() if row["device"] == device])
        for device in sorted({row["device"] for row in rows.values()})
    )


def summary_of(device: str, rows: list[dict[str, Any]]) -> str:
    """The lines of one device."""
    answered = [row for row in rows if row["batch_size"]]
    survivors, tight = (sum(row[key] for row in rows) for key in ("survives", "is_tight"))
    lines = [f"{device}: survival {survivors} of {len(rows)}, tight {tight} of {len(rows)}"]
    if long := [row["long"] for row in rows if "long" in row]:
        lines.append(f"{LONG_STEPS} steps at the answer: {sum(map(survived, long))} of {len(long)}")
    compared = [row for row in answered if row.get("bisection", {}).get("batch_size")]
    if compared:
        theirs = [row["bisection"] for row in compared]
        lines += [
            spread("full-size steps", [row["full_size_steps"] for row in answered]),
            spread("  of theirs", [each["full_size_steps"] for each in theirs]),
            spread("seconds", [row["seconds"] for row in answered]),
            spread("  of theirs", [each["wall_seconds"] for each in theirs]),
            spread(
                "seconds, ours / theirs",
                [row["seconds"] / row["bisection"]["wall_seconds"] for row in compared],
            ),
            spread(
                "seconds of CPU, ours / theirs",
                [row["cpu_seconds"] / row["bisection"]["cpu_seconds"] for row in compared],
            ),
        ]
    return "\n".join(lines)


def spread(name: str, values: list[float]) -> str:
    """The median and the worst."""
    return f"{name}: median {median(values):.2f}, worst {max(values):.2f}"


if __name__ == "__main__":
    main()
