"""The options that all launches of a search share."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from batchfinder.errors import DeviceError, UsageError
from batchfinder.units import check_seconds

if TYPE_CHECKING:
    from batchfinder.probing.devices.device import DeviceMemory


@dataclass(frozen=True)
class RunOptions:
    """The options that all launches of a search share.

    Attributes:
        device: the user's choice; None for the accelerator if there is one, else the CPU.
        memory_limit: bytes to use at most; None for all free memory.
        headroom: the fraction of the memory kept free.
        steps: the least number of steps in a launch.
        mode: ``"train"`` counts optimizer steps; others count forward passes without gradients.
        timeout_seconds: how long a launch may report nothing; None to learn it from earlier ones.
        show_output: True to copy the script's output to standard error.
    """

    device: str | None = None
    memory_limit: int | None = None
    headroom: float = 0.05
    steps: int = 3
    mode: str = "train"
    timeout_seconds: float | None = None
    show_output: bool = False

    @property
    def step(self) -> str:
        """The name of a counted step, for messages."""
        return "training step" if self.mode == "train" else "forward pass"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps must be at least 1, not {self.steps}. Try --steps 3")
        check_seconds("--timeout", self.timeout_seconds)


def choose_kind(asked: str | None) -> tuple[str, dict[str, str]]:
    """Return the kind of device, and the variables that make a script choose it."""
    if sys.platform != "linux":
        raise DeviceError("batchfinder run needs Linux. Try batchfinder find")
    # Late: it imports torch.
    from batchfinder.probing.devices.choose_device import accelerator, parse_device

    found = accelerator()
    kind, _, index = (asked or (found.type if found else "cpu")).partition(":")
    if kind not in ("cpu", "cuda"):
        raise DeviceError(f"batchfinder run cannot limit {kind}. Try --device cpu or cuda")
    if kind == "cuda" and (found is None or found.type != "cuda"):
        raise DeviceError("there is no CUDA device here. Try --device cpu")
    if kind == "cpu" and found:
        return kind, {"CUDA_VISIBLE_DEVICES": ""}
    number = parse_device(asked).index if asked and index else None
    return kind, {} if number is None else only_device(number, os.environ)


def only_device(index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows a script one of the CUDA devices that this process sees.

    A scheduler may have chosen these devices, so their numbers here are not those of the machine.

    Raises:
        DeviceError: this process sees fewer.

    Example:
        >>> only_device(1, {"CUDA_VISIBLE_DEVICES": "4,GPU-5ebe9f43"})
        {'CUDA_VISIBLE_DEVICES': 'GPU-5ebe9f43'}
    """
    usual = "CUDA_VISIBLE_DEVICES"
    # ROCm has both, and prefers the first.
    name = next(filter(environment.get, ("HIP_VISIBLE_DEVICES", usual)), usual)
    visible = environment.get(name)
    if not visible:
        return {usual: str(index)}
    shown = visible.split(",")
    if index >= len(shown):
        raise DeviceError(f"there is no cuda:{index} here. {name} is {visible}. Try --device cuda")
    return {name: shown[index].strip()}


def cpu_memory(options: RunOptions, processes: int) -> tuple[DeviceMemory, int]:
    """Return each process's share of the CPU's memory, and of the budget in bytes."""
    from batchfinder.probing.devices.cpu import CpuDevice
    from batchfinder.probing.devices.device import budget

    memory = replace(CpuDevice().memory(), held_bytes=0)  # this process does not train
    budget_bytes = budget(memory, options.memory_limit, options.headroom) // processes
    capacity, others = memory.capacity_bytes // processes, memory.used_by_others_bytes // processes
    return replace(memory, capacity_bytes=capacity, used_by_others_bytes=others), budget_bytes


def make_order(
    options: RunOptions, cpu_budget_bytes: int | None, cuda_budget_bytes: int | None
) -> dict[str, Any]:
    """Return the order for the hook: the limits, what to count, and what running out looks like.

    Args:
        options: the options of all launches.
        cpu_budget_bytes: the budget if the CPU trains, else None.
        cuda_budget_bytes: the budget of each CUDA device; None if no launch has shown it yet.
    """
    from batchfinder.probing.devices.oom_table import TABLE, Tier  # late: it imports torch

    rows = [row for row in TABLE if row.pattern and row.types]
    return {
        "is_only_watched": False,
        "limit_bytes": options.memory_limit,
        "headroom": options.headroom,
        "cpu_budget_bytes": cpu_budget_bytes,
        "cuda_budget_bytes": cuda_budget_bytes,
        "counts_passes": options.mode != "train",
        "certain": [row.pattern for row in rows if row.tier is Tier.CERTAIN],
        "doubtful": [row.pattern for row in rows if row.tier is Tier.PROBABLE],
    }
