"""What every launch of a search has in common."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace

from batchfinder.errors import DeviceError, UsageError
from batchfinder.probing.devices.choose import accelerator
from batchfinder.probing.devices.cpu import CpuDevice
from batchfinder.probing.devices.device import DeviceMemory, budget


@dataclass(frozen=True)
class RunOptions:
    """What every launch of a search has in common.

    Attributes:
        device: the user's choice; None: the accelerator if there is one, else the CPU.
        memory_limit: in bytes, as if the device had no more; None: all that is free.
        headroom: the fraction of the memory kept free.
        steps: how many steps a launch runs at least.
        mode: ``"train"``: steps of optimizers count; else forward passes without gradients.
        timeout_seconds: how long a launch may report nothing; None: by the launches before.
        show_output: whether what the script prints goes to standard error.
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
        """How the steps that are counted are called."""
        return "training step" if self.mode == "train" else "forward pass"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"--steps must be at least 1, not {self.steps}. Try --steps 3")
        seconds = self.timeout_seconds
        if seconds is not None and not 0 < seconds < math.inf:
            raise UsageError(f"--timeout must be above 0, not {seconds:g}. Try --timeout 600")


def choose_kind(asked: str | None) -> tuple[str, dict[str, str]]:
    """The kind of device, and the variables that make a script choose it."""
    if sys.platform != "linux":
        raise DeviceError("batchfinder run needs Linux. Try batchfinder find")
    found = accelerator()
    kind, _, index = (asked or (found.type if found else "cpu")).partition(":")
    if kind not in ("cpu", "cuda"):
        raise DeviceError(f"batchfinder run cannot limit {kind}. Try --device cpu or cuda")
    if kind == "cuda" and (found is None or found.type != "cuda"):
        raise DeviceError("there is no CUDA device here. Try --device cpu")
    if kind == "cpu" and found:
        return kind, {"CUDA_VISIBLE_DEVICES": ""}
    return kind, {"CUDA_VISIBLE_DEVICES": index} if index else {}


def cpu_memory(options: RunOptions, processes: int) -> tuple[DeviceMemory, int]:
    """The CPU's memory, and what each process may use of it."""
    memory = replace(CpuDevice().memory(), held_bytes=0)  # that of this process is no matter
    budget_bytes = budget(memory, options.memory_limit, options.headroom)
    return memory, budget_bytes if options.memory_limit else budget_bytes // processes
