"""Run a training script at one batch size under a memory limit: does memory run out?

The judge of ``bench_scripts.py``. It uses the hook of ``batchfinder run`` to set the limit and to
count the steps, but none of its rules: a script survives if it runs every step.

    python scripts/benchmarks/parts/script_at.py 64 --gib 2 -- python train.py --bs {batch_size}

Prints one JSON object: outcome ("survived", "oom", "error"), steps, flushes (of the steps
after the third, those in which CUDA's allocator flushed its cache), reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from batchfinder.cli.run import parse_settings
from batchfinder.launching.launch import Launch
from batchfinder.launching.options import (
    RunOptions,
    choose_kind,
    cpu_memory,
    make_order,
)
from batchfinder.launching.record import Record
from batchfinder.launching.template import Template
from batchfinder.launching.verdict import judge
from batchfinder.results.probe import Outcome

FIRST_STEPS = 3  # the allocator may flush its cache until the optimizer's states have their place


def main() -> None:
    """Launch the script once, and print how it went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("batch_size", type=int)
    parser.add_argument("--gib", type=float, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    options = RunOptions(asked.device, int(asked.gib * 2**30), steps=asked.steps)
    kind, environment = choose_kind(asked.device)
    template = Template(asked.command, {**environment, **parse_settings(asked.env)})
    cpu_bytes = cpu_memory(options, 1)[1] if kind == "cpu" else None
    print(json.dumps(trained(template, asked.batch_size, options, cpu_bytes, asked.seconds)))


def trained(
    template: Template, size: int, options: RunOptions, cpu_bytes: int | None, seconds: float
) -> dict[str, Any]:
    """Launch a script at one size, and return how far it came."""
    record = Record(
        size, steps=options.steps, headroom=options.headroom, cpu_budget_bytes=cpu_bytes
    )
    launch = Launch(template, size, make_order(options, cpu_bytes, None), options.steps)
    steps = flushes = 0
    with closing(launch):
        for report in launch.reports():
            if report is not None:
                record.add(report)
                steps += report["event"] == "step"
                flushes += steps > FIRST_STEPS and report.get("retries", 0) > 0
            if record.out_of_memory or steps >= options.steps:
                break
            if time.monotonic() - record.started > seconds:
                reason = f"took more than {seconds:g} s"
                return {"outcome": "error", "steps": steps, "flushes": flushes, "reason": reason}
    found = {"outcome": "survived", "steps": steps, "flushes": flushes, "reason": ""}
    if steps < options.steps:
        verdict = judge(record, launch.exit_status, launch.output, "")
        is_oom = verdict.probe.outcome is Outcome.OOM
        reason = verdict.probe.note or "the script ended by itself"
        found |= {"outcome": "oom" if is_oom else "error", "reason": reason}
    return found


if __name__ == "__main__":
    main()
