"""A model that one rank of several has trouble with, in a phase of its step."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from batchfinder import TrainingSetup

MIB = 2**20


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def raise_error() -> None:
    raise ValueError("no such width")


DEEDS: dict[str, Callable[[], object]] = {
    "oom": run_out_of_memory,
    "raise": raise_error,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(1000),
}


class Trouble:
    """Does its deed on one rank, in one phase, once the batch has ``at`` examples.

    With ``once``, the name of a file, only the first time, which leaves its process id there.
    """

    def __init__(self, deed: str, phase: str, at: int, rank: int, once: str) -> None:
        self.deed, self.phase, self.at, self.rank, self.once = deed, phase, at, rank, once
        self.batch_size = 0

    def come(self, phase: str) -> None:
        is_here = phase == self.phase and dist.get_rank() == self.rank
        if not self.deed or not is_here or self.batch_size < self.at:
            return
        if self.once:
            with contextlib.suppress(FileExistsError):
                Path(self.once).touch(exist_ok=False)
                Path(self.once).write_text(f"{os.getpid()}\n")
                DEEDS[self.deed]()
            return
        DEEDS[self.deed]()


class _Kept(torch.autograd.Function):
    """Keeps 40 MiB per example for the backward pass, which nothing is ever written to."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trouble: Trouble | None) -> Tensor:
        ctx.trouble = trouble
        ctx.save_for_backward(torch.empty(len(rows), 40 * MIB, dtype=torch.uint8))
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if ctx.trouble is not None:
            ctx.trouble.come("backward")
        return gradients[0], None


class Layered(nn.Module):
    """Two layers, so that there are collectives on both sides of the trouble."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.trouble = trouble

    def forward(self, rows: Tensor) -> Tensor:
        self.trouble.batch_size = len(rows)
        rows = self.layers[0](rows)
        self.trouble.come("forward")
        rows = _Kept.apply(rows, self.trouble)  # type: ignore[no-untyped-call]
        output: Tensor = self.layers[1](rows)
        return output.mean()


def build(
    deed: str = "", phase: str = "forward", at: int = 1, rank: int = 1, once: str = ""
) -> TrainingSetup:
    """``deed``: one of DEEDS, or nothing."""
    trouble = Trouble(deed, phase, at, rank, once)

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            trouble.come("optimizer")
            return super().step(closure)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return Optimizer(parameters, lr=0.1)

    return TrainingSetup(Layered(trouble), torch.ones(2, 8), optimizer=optimizer)


def build_of_width(width: int = 8) -> tuple[nn.Module, Tensor]:
    return nn.Linear(8, 8), torch.ones(2, width)


def build_slowly(rank: int = 1) -> tuple[nn.Module, Tensor]:
    """One rank never gets its target loaded."""
    if dist.get_rank() == rank:
        time.sleep(1000)
    return nn.Linear(8, 8), torch.ones(2, 8)
