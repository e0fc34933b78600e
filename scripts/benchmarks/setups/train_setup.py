"""Train a set-up with its own loop in a fresh process, under a memory limit.

    python scripts/benchmarks/setups/train_setup.py images.py --batch-size 64 --budget 20000000000
    python scripts/benchmarks/setups/train_setup.py images.py --bisect --budget 20000000000

Runs the file as a script, so that its loop is at module level: all names of one step live on until
the next step replaces them. Knows nothing of batchfinder. Prints one JSON object: outcome
("survived", "oom", "error"), steps that ended, how many after the second flushed the allocator's
cache to find room, reason; or, with ``--bisect``, the batch size that
doubling and bisection find (3 steps at each size, as people write it by hand), steps and samples.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import runpy
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import setup_loop  # noqa: E402
import torch  # noqa: E402
from parts.peers import bisected  # noqa: E402
from parts.train_at import is_out_of_memory, limit_memory  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

# At each size that doubling and bisection try; as peers.py.
BISECTION_STEPS = 3

# The allocator may flush its cache while it fills, until the optimizer's states are there too.
STEPS_THAT_MAY_FLUSH = 2


class Loop:
    """The loop of a set-up, and how many steps it has ended.

    Args:
        file: the set-up's.

    Attributes:
        flushing_steps: the steps after the second that flushed the allocator's cache.
    """

    def __init__(self, file: str) -> None:
        self.file = str(FOLDER / file)
        self._by_optimizer: Counter[int] = Counter()
        self._flushes = 0
        self.flushing_steps: set[int] = set()
        register_optimizer_step_post_hook(self._count)

    def run(self, batch_size: int, steps: int) -> tuple[int, BaseException | None]:
        """Train; return the number of steps that ended, and the error that ended them."""
        self._by_optimizer.clear()
        self.flushing_steps.clear()
        setup_loop.batch_size, setup_loop.steps = batch_size, steps
        try:
            with contextlib.redirect_stdout(sys.stderr):
                runpy.run_path(self.file, run_name="__main__")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the verdict
            return self._steps(), error
        return self._steps(), None

    def _count(self, optimizer: Any, *_: Any) -> None:
        self._by_optimizer[id(optimizer)] += 1
        flushes = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        if flushes > self._flushes and self._steps() > STEPS_THAT_MAY_FLUSH:
            self.flushing_steps.add(self._steps())
        self._flushes = flushes

    def _steps(self) -> int:
        return max(self._by_optimizer.values(), default=0)


def judge(loop: Loop, batch_size: int, steps: int) -> dict[str, Any]:
    """Train at one size, and say how it went."""
    ended, error = loop.run(batch_size, steps)
    outcome = "survived"
    if error is not None:
        outcome = "oom" if is_out_of_memory(error) else "error"
    elif ended < steps:
        outcome = "error"
    return {
        "batch_size": batch_size,
        "outcome": outcome,
        "steps": ended,
        "flushing_steps": len(loop.flushing_steps),
        "reason": first_line(error) if error else "",
    }


def bisect(loop: Loop) -> dict[str, Any]:
    """Find a size by doubling and bisection in this process."""
    report: dict[str, Any] = {"batch_size": 0, "steps": 0, "samples": 0, "error": ""}

    def fits(batch_size: int) -> bool:
        ended, error = loop.run(batch_size, BISECTION_STEPS)
        ran_out = error is not None and is_out_of_memory(error)
        if error is not None and not ran_out:
            raise error
        report["steps"] += ended + ran_out
        report["samples"] += (ended + ran_out) * batch_size
        del error
        setup_loop.forget_gradients()
        gc.collect()
        return not ran_out

    try:
        report["batch_size"] = bisected(fits)
    except Exception as error:  # noqa: BLE001 - it is how the search ended
        report["error"] = first_line(error)
    return report


def first_line(error: BaseException) -> str:
    """One line of what an error says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def main() -> None:
    """Judge or bisect, as asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", help="in this folder")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--bisect", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the data")
    parser.add_argument("--budget", type=int, help="bytes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--arguments", type=json.loads, default={}, help="of the target, in JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    setup_loop.device, setup_loop.arguments = options.device, options.arguments
    setup_loop.in_bf16, setup_loop.seed = options.bf16, options.seed
    started = time.perf_counter()
    loop = Loop(options.file)
    limit_memory(options.budget, torch.device(options.device))
    report = bisect(loop) if options.bisect else judge(loop, options.batch_size, options.steps)
    print(json.dumps({**report, "seconds": round(time.perf_counter() - started, 1)}))


if __name__ == "__main__":
    main()
