"""A small training step with one fault in it.

Each example holds 96 MiB from the forward to the backward pass, which nothing is ever written to,
so that a search under 1 GiB ends in seconds and its answer is the same every time.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from batchfinder import TrainingSetup

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "targets"))
from deaths import DEEDS as DEATHS

HELD_BYTES = 96 * 2**20
TOO_MUCH_BYTES = 2**44


@dataclass
class Fault:
    """A fault at one stage of the step.

    Attributes:
        stage: "load", "batch", "copy", "forward", "loss", "backward" or "optimizer".
        deed: names from DEEDS, separated by blanks.
        at: the smallest batch size at which it happens.
        nth: in which step of a process at the same size it happens first.
        chance: how likely it happens each time.
        once: a file; only the process that can create it does the deed, and leaves its id there.
    """

    stage: str
    deed: str
    at: int = 1
    nth: int = 1
    chance: float = 1.0
    once: str = ""
    size: int = 0
    steps: int = 0

    def begin(self, size: int) -> None:
        """Note that a step begins."""
        self.steps = self.steps + 1 if size == self.size else 1
        self.size = size

    def reach(self, stage: str) -> None:
        """Do the deed if this is the stage for it, and the time."""
        if stage != self.stage or random.SystemRandom().random() >= self.chance:
            return
        if stage != "load" and (self.size < self.at or self.steps < self.nth):
            return
        if self.once:
            try:
                with Path(self.once).open("x") as file:
                    file.write(f"{os.getpid()}\n")
            except FileExistsError:
                return
        for name in self.deed.split():
            DEEDS[name]()


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        ctx.save_for_backward(torch.empty(len(rows), HELD_BYTES, dtype=torch.uint8))
        return rows * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.fault.reach("backward")
        return gradients[0], gradients[0].sum(), None


class Faulty(nn.Module):
    """Multiplies by one number; with normalization, random numbers and state to be kept."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.normalize = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.5)
        self.fault = fault

    def forward(self, rows: Tensor) -> Tensor:
        """The rows, multiplied."""
        self.fault.reach("forward")
        images = self.drop(self.normalize(rows.to(self.weight.dtype).reshape(-1, 3, 2, 2)))
        output: Tensor = _Hold.apply(images.flatten(1), self.weight, self.fault)
        return output


class FaultySGD(torch.optim.Adam):
    """An optimizer whose step goes wrong."""

    def __init__(self, parameters: Any, fault: Fault) -> None:
        super().__init__(parameters)
        self.fault = fault

    def step(self, *arguments: Any, **more: Any) -> Any:
        """One step, or the deed."""
        self.fault.reach("optimizer")
        return super().step(*arguments, **more)


def build(**fault: Any) -> TrainingSetup:
    """Build a setup with a fault in it, or none; the arguments are those of :class:`Fault`."""
    return build_setup(Fault(**{"stage": "none", "deed": "", **fault}))


def build_setup(fault: Fault) -> TrainingSetup:
    """Build a setup with a fault in it."""
    fault.reach("load")

    def make_batch(size: int) -> Tensor:
        fault.begin(size)
        fault.reach("batch")
        return torch.ones(size, 12)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        fault.reach("copy")
        output = model(batch.to("cpu", copy=True))
        fault.reach("loss")
        return output.mean()

    return TrainingSetup(
        Faulty(fault),
        make_batch=make_batch,
        step=step,
        optimizer=lambda parameters: FaultySGD(parameters, fault),
    )


def run_out_of_memory() -> None:
    """Ask for more than any machine has: the allocator's own error, under the real limit."""
    torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8)


def start_threads() -> None:
    """Start threads that outlive the step, as those of a pool do."""
    if threading.active_count() > 4:
        return
    threading.stack_size(2**20)
    for _ in range(4):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def print_like_an_answer() -> None:
    """Print what looks like an answer of a worker, and bytes that are not text."""
    for stream in (1, 2):
        os.write(stream, b'{"answer": "probe", "probe": {}}\n\xff\xfe\x00\n' + b"x" * 100_000)


DEEDS: dict[str, Callable[[], object]] = {
    **DEATHS,
    "oom": run_out_of_memory,
    "threads": start_threads,
    "garbage": print_like_an_answer,
    "change_folder": lambda: os.chdir("/"),
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "default_device": lambda: torch.set_default_device("meta"),
    "seed": lambda: (random.seed(0), torch.manual_seed(0)),
    "pause": lambda: time.sleep(5),
    "no_grad": lambda: torch.set_grad_enabled(False),
}
