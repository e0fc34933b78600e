"""What the hook of ``batchfinder run`` costs: the start of a launch, and each step.

Bare and hooked runs of one script alternate. Of the starts the median pair counts, of the steps the
least: other programs only add.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from parts.case import markdown_table  # sets the path to the package

from batchfinder.launching.launch import Launch
from batchfinder.launching.template import Template

STARTS, ROUNDS = 11, 5
STEPS = 60

# No limit, and errors that do not occur.
ORDER: dict[str, Any] = {
    **dict.fromkeys(("limit_bytes", "cuda_budget_bytes", "cpu_budget_bytes")),
    "headroom": 0.05,
    "counts_passes": False,
    "certain": ["^no such error$"],
    "doubtful": ["^no such error$"],
}

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
    ways = {"bare": False, "with the hook": True}
    pairs = []
    for _ in range(STARTS):
        bare, hooked = (_run(script, 1, hooked=hooked)[0] for hooked in ways.values())
        pairs.append([with_hook - without for with_hook, without in zip(hooked, bare, strict=True)])
    wall, cpu = (median(differences) for differences in zip(*pairs, strict=True))
    print(f"a start with the hook: {wall:+.2f} s, {cpu:+.2f} s of CPU time", flush=True)
    steps: dict[str, float] = dict.fromkeys(ways, math.inf)
    for _ in range(ROUNDS):
        for name, is_hooked in ways.items():
            steps[name] = min(steps[name], median(_run(script, STEPS, hooked=is_hooked)[1]))
    rows = [(name, f"{steps[name] * 1e3:.2f} ms") for name in ways]
    print(markdown_table(("script", "CPU time of a step"), rows))


def _run(script: Path, steps: int, *, hooked: bool) -> tuple[tuple[float, float], list[float]]:
    """Run the script; return its seconds and CPU seconds, and the CPU seconds of its steps."""
    command = [sys.executable, str(script), "{batch_size}", str(steps)]
    began, cpu_began = time.monotonic(), _cpu_seconds()
    if hooked:
        launch = Launch(Template(command), 8, ORDER, steps + 1)
        with closing(launch):
            for _ in launch.reports():
                pass
        output = launch.output
    else:
        command[2] = "8"
        output = subprocess.check_output(command, text=True)
    seconds = time.monotonic() - began, _cpu_seconds() - cpu_began
    lines = [line.split() for line in output.splitlines()]
    return seconds, [float(line[1]) for line in lines if line[:1] == ["step"]]


def _cpu_seconds() -> float:
    """Return the CPU seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
