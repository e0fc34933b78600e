"""The host's memory during a launch, where loader workers and /dev/shm count too."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable

from batchfinder.launching.memory_in_use import resident_bytes
from batchfinder.probing.devices.cpu import host_memory
from batchfinder.units import format_bytes

SHARED = "/dev/shm"

# A launch is ended when less than this share of the host's memory is free: soon the system would
# kill a process, and perhaps not one of the launch.
LEAST_FREE = 0.03
LOOK_SECONDS = 0.25

# Reasons of failures begin with this if the host decides, not the device.
HOST = "the host's memory ran out"
ADVICE = (
    "the host's memory decides, not the device's. Try fewer loader workers, or end other processes"
)

# How PyTorch says that a loader worker got no shared memory, or was killed for lack of memory:
# torch/utils/data/_utils/signal_handling.py, aten/src/ATen/MapAllocator.cpp.
_NO_SHARED = re.compile(
    r"out of shared memory|unable to (allocate|resize|open) shared memory"
    r"|unable to write to file </torch_"
)
_WORKER_KILLED = re.compile(r"DataLoader worker .* is killed by signal: Killed")


class HostWatch:
    """Watches the free memory of the host while the processes of a launch run."""

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        self._processes = processes
        self._looked = 0.0
        # What is full before the launch says nothing about it.
        self._kinds = [kind for kind in (host_memory, _shared) if not _is_short(*kind())]

    def shortage(self) -> str:
        """Return why the launch has to end for lack of host memory; "" if it need not."""
        if time.monotonic() < self._looked + LOOK_SECONDS:
            return ""
        self._looked = time.monotonic()
        for kind in self._kinds:
            total, free = kind()
            if _is_short(total, free):
                name = "" if kind is host_memory else f" in {SHARED}"
                # Which of them train is known only after their first step.
                own = (resident_bytes(pid, with_shared=False) for pid in self._processes())
                used = sum(filter(None, own))
                shared_total, shared_free = _shared()
                shared = shared_total - shared_free
                return (
                    f"{HOST}{name}: {format_bytes(free)} of {format_bytes(total)} were left, while "
                    f"the command's processes used {format_bytes(used)}, and {SHARED} "
                    f"{format_bytes(shared)}"
                )
        return ""


def shortage_in(text: str) -> str:
    """Return why host memory ran out, by what a script printed; "" if it did not.

    Example:
        >>> shortage_in("DataLoader's workers are out of shared memory.")
        "the host's memory ran out in /dev/shm, which passes batches from loader workers"
    """
    if _NO_SHARED.search(text):
        return f"{HOST} in {SHARED}, which passes batches from loader workers"
    return f"{HOST}: a loader worker was killed" if _WORKER_KILLED.search(text) else ""


def _is_short(total: int, free: int) -> bool:
    return free < LEAST_FREE * total


def _shared() -> tuple[int, int]:
    try:
        status = os.statvfs(SHARED)
    except OSError:  # this host has none
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
