"""What the hook of ``batchfinder run`` costs: the start of a launch, and each step.

Bare and hooked runs of one script alternate. Of the starts the median pair counts, of the steps the
least: other programs only add. What it adds to a step does not depend on the batch size, and shows
clearly only where steps are short.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from parts.case import markdown_table  # sets the path to the package

from batchfinder.launching.launch import Launch
from batchfinder.launching.options import RunOptions, make_order
from batchfinder.launching.template import Template

STARTS, ROUNDS = 11, 5
STEPS = 60
SMALL, USUAL = 1, 8  # examples in a step

# Prints the CPU seconds of each of its steps; as many modules as a language model has.
SCRIPT = """
import sys, time, torch
torch.set_num_threads(1)
layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(int(sys.argv[2])):
    began = time.process_time()
    model(torch.randn(int(sys.argv[1]), 64, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", time.process_time() - began, flush=True)
"""


def print_costs(folder: Path) -> None:
    """Measure both, and print a table."""
    script = folder / "hook_cost.py"
    script.write_text(SCRIPT)
    ways = {"bare": None, "with the hook": make_order(RunOptions(), None, None)}
    pairs = []
    for _ in range(STARTS):
        bare, hooked = (_run(script, 1, order)[0] for order in ways.values())
        pairs.append([with_hook - without for with_hook, without in zip(hooked, bare, strict=True)])
    wall, cpu = (median(differences) for differences in zip(*pairs, strict=True))
    print(f"a start with the hook: {wall:+.2f} s, {cpu:+.2f} s of CPU time", flush=True)
    steps = dict.fromkeys(((name, size) for size in (SMALL, USUAL) for name in ways), math.inf)
    for _ in range(ROUNDS):
        for name, size in steps:
            seconds = median(_run(script, STEPS, ways[name], size)[1])
            steps[name, size] = min(steps[name, size], seconds)
    rows = [(name, size, f"{seconds * 1e3:.2f} ms") for (name, size), seconds in steps.items()]
    print(markdown_table(("script", "examples", "CPU time of a step"), rows))
    added = steps["with the hook", SMALL] - steps["bare", SMALL]
    share = added / steps["bare", USUAL]
    print(f"the hook adds {added * 1e3:.2f} ms to a step: {share:.1%} of one with {USUAL} examples")


def _run(
    script: Path, steps: int, order: Mapping[str, Any] | None, size: int = USUAL
) -> tuple[tuple[float, float], list[float]]:
    """Run the script; return its seconds and CPU seconds, and the CPU seconds of its steps.

    ``order`` is for the hook; None to run without it.
    """
    command = [sys.executable, str(script), "{batch_size}", str(steps)]
    began, cpu_began = time.monotonic(), _cpu_seconds()
    if order is not None:
        launch = Launch(Template(command), size, order, steps + 1)
        with closing(launch):
            reported = [report["event"] for report in launch.reports() if report]
        assert reported.count("step") == steps, reported  # else the cost of nothing is measured
        output = launch.output
    else:
        command[2] = str(size)
        output = subprocess.check_output(command, text=True)
    seconds = time.monotonic() - began, _cpu_seconds() - cpu_began
    lines = [line.split() for line in output.splitlines()]
    return seconds, [float(line[1]) for line in lines if line[:1] == ["step"]]


def _cpu_seconds() -> float:
    """Return the CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
