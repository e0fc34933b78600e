"""The memory that a training uses now, read from outside: NVML for GPUs, /proc for the host."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from batchfinder.launching.guardian import PROC, descendants, stat_of


@dataclass(frozen=True)
class GpuUsage:
    """The memory of one GPU, in bytes.

    Attributes:
        name: the GPU's index and name.
        total_bytes: the GPU's memory.
        process_bytes: memory used by the watched processes; None if the driver does not report it,
            as in most containers.
        others_bytes: memory used by everything else; all used memory if ``process_bytes`` is None.
    """

    name: str
    total_bytes: int
    process_bytes: int | None
    others_bytes: int


@dataclass(frozen=True)
class Usage:
    """The memory of a process and its descendants.

    Attributes:
        processes: the number of processes.
        host_bytes: their resident memory, in bytes; shared pages count once for each process.
        gpus: the GPUs that they use; every GPU if the driver does not report which.
    """

    processes: int
    host_bytes: int
    gpus: tuple[GpuUsage, ...]


class Gpus:
    """The GPUs of this machine, through NVML (package ``nvidia-ml-py``).

    Attributes:
        missing: why no GPU can be read; "" if they can.
    """

    def __init__(self) -> None:
        self.missing = ""
        self._handles: list[Any] = []
        try:
            self._nvml = import_module("pynvml")
        except ImportError:
            self.missing = "GPUs are not shown. Try pip install nvidia-ml-py"
            return
        try:
            self._nvml.nvmlInit()
            self._handles = [
                self._nvml.nvmlDeviceGetHandleByIndex(index)
                for index in range(self._nvml.nvmlDeviceGetCount())
            ]
            self.read(set())  # GPUs that share the host's memory do not say how much is used
        except self._nvml.NVMLError as error:
            self.missing = f"GPUs are not shown: NVML says {error}"
            self._handles = []

    def read(self, pids: set[int]) -> tuple[GpuUsage, ...]:
        """Read the memory of the GPUs that some processes use."""
        found = []
        for index, handle in enumerate(self._handles):
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            name = self._nvml.nvmlDeviceGetName(handle)
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            own = [one.usedGpuMemory for one in running if one.pid in pids]
            used = None if not own or None in own else sum(own)
            found.append(GpuUsage(f"{index} {name}", memory.total, used, memory.used - (used or 0)))
        known = tuple(gpu for gpu in found if gpu.process_bytes is not None)
        return known or tuple(found)


def read_usage(pid: int, gpus: Gpus) -> Usage | None:
    """Read the memory of a process and its descendants; None if the process has ended."""
    if resident_bytes(pid) is None:
        return None
    pids = {pid, *descendants(pid)}
    resident = [size for size in map(resident_bytes, pids) if size is not None]
    return Usage(len(resident), sum(resident), gpus.read(pids))


def resident_bytes(pid: int, *, with_shared: bool = True) -> int | None:
    """Return a process's resident memory; None if it has ended, or only waits to be reaped.

    Pages that it shares with other processes count, unless ``with_shared`` is False.
    """
    with suppress(OSError, ValueError):
        pages, shared = map(int, (PROC / str(pid) / "statm").read_text().split()[1:3])
        if pages and stat_of(pid)[:1] != ["Z"]:  # a process that is just ending has no pages
            return (pages if with_shared else pages - shared) * os.sysconf("SC_PAGE_SIZE")
    return None
