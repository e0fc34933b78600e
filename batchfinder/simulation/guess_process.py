"""The guess of a search whose workers load the target, made in a process of its own.

A target may put its model on the GPU by itself. Loaded in the process of the search, it would stay
there and take memory from the workers; with a process ends all that it holds. And the process of
the search does without PyTorch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.python_command import python_command
from batchfinder.probing.workers.source import SetupSource, load_ordered
from batchfinder.search.bounds import Bounds

# Most estimates take seconds; this is for one that would not end.
LONGEST_SECONDS = 300.0


def guess_in_process(
    source: SetupSource,
    options: ProbeOptions,
    device: str,
    budget_bytes: int,
    bounds: Bounds,
) -> tuple[int | None, list[str]]:
    """As :func:`~batchfinder.simulation.guess.guess_batch_size`, of a target loaded elsewhere.

    Args:
        source: where to load the setup from.
        options: of the steps.
        device: the name of the one at hand.
        budget_bytes: what the steps may use.
        bounds: the smallest size, the largest or None, and what each is a multiple of.

    Returns:
        The size, or None where the simulation cannot tell; and what the user should know.
    """
    order = {
        "source": source.to_order(),
        "options": options.to_dict(),
        "device": device,
        "budget_bytes": budget_bytes,
        "bounds": bounds,
    }
    try:
        child = subprocess.run(
            python_command("batchfinder.simulation.guess_process"),
            input=json.dumps(order).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the workers have shown what the target prints
            timeout=LONGEST_SECONDS,
            check=True,
        )
        answer = json.loads(child.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return None, [f"the search started without an estimate: {type(error).__name__}: {error}"]
    return answer["guess"], answer["notes"]


def main() -> None:
    """Make one guess: the order comes on standard input, the answer goes to standard output."""
    order = json.loads(sys.stdin.buffer.read())
    # What the user's code prints must not mix with the answer.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        guess, notes = _guess(order)
        json.dump({"guess": guess, "notes": notes}, answers)


def _guess(order: dict[str, Any]) -> tuple[int | None, list[str]]:
    from batchfinder.simulation.guess import guess_batch_size

    try:
        setup, _ = load_ordered(order["source"])
        return guess_batch_size(
            setup,
            ProbeOptions.from_dict(order["options"]),
            order["device"],
            order["budget_bytes"],
            tuple(order["bounds"]),
        )
    except Exception as error:  # noqa: BLE001 - the user's code runs here, and the workers tell
        reason = "".join(f"{type(error).__name__}: {error}".splitlines()[:1])
        return None, [f"the search started without an estimate: {reason}"]
