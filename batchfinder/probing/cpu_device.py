"""The CPU of a Linux machine: a real limit from the operating system, peaks from /proc.

The limit is ``RLIMIT_DATA``, the one that ``ulimit -d`` sets. It counts private writable memory,
and when it is reached PyTorch raises an error that it recovers from, instead of the kernel killing
some process. The peak is the resident set's high-water mark (``VmHWM``), which ``/proc/self/
clear_refs`` resets (https://docs.kernel.org/filesystems/proc.html), corrected by how much of the
counted memory is not resident.

glibc by and by takes tensors of up to 32 MiB from a heap, where they leave holes: the same step
needs up to a tenth more or less from run to run, and after an OOM the holes stay. Probes therefore
run with every tensor mapped by itself (``M_MMAP_THRESHOLD``, mallopt(3)), which is exact and
leaves nothing behind; confirmations run with the heap as the user's training will have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from batchfinder.errors import DeviceError
from batchfinder.probing.device import DeviceMemory, Peaks

M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 128 * 1024  # glibc's initial one, which it raises unless it is set

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
RESET_HIGH_WATER_MARK = "5"


class CpuDevice:
    """See :class:`~batchfinder.probing.device.Device`.

    Raises:
        DeviceError: this is not Linux, or /proc is not there.
    """

    torch_device = torch.device("cpu")
    name = "cpu"
    limit_warning: str | None = None

    def __init__(self) -> None:
        # The heap keeps holes where a failed step's tensors lay: smaller sizes then fail as well.
        self.recovers_from_oom = False
        if sys.platform != "linux":
            raise DeviceError(
                "on this system the CPU's memory cannot be limited, and running out of it would "
                "take the machine down; use --device with an accelerator, or a Linux machine"
            )
        try:
            _status()
        except OSError as error:
            raise DeviceError(
                f"the memory of this process cannot be read ({error}); mount /proc"
            ) from None

    def make_recoverable(self) -> None:
        # Other C libraries have no such call, and other ways.
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            self.recovers_from_oom = bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES))

    def first_confirmation_limit(self, budget_bytes: int, headroom: float) -> int:
        # Half of the headroom is for the heap's holes, the other half stays free. Holes for which
        # that is not enough differ as much from run to run, and then all of it has to stay free.
        return math.floor(budget_bytes / (1 - headroom) * (1 - headroom / 2))

    def memory(self) -> DeviceMemory:
        status, meminfo = _status(), _fields(PROC / "meminfo")
        capacity, available = meminfo["MemTotal"], meminfo["MemAvailable"]
        for limit, used in _cgroup_limits():
            capacity = min(capacity, limit)
            available = min(available, limit - used)
        held = status["VmData"]
        used_by_others = max(0, capacity - available - status["VmRSS"])
        soft_limit = _soft_limit()
        if soft_limit is not None and soft_limit < capacity:
            capacity, used_by_others = soft_limit, 0
        return DeviceMemory(capacity, used_by_others, 0, held)

    @contextlib.contextmanager
    def limited_to(self, budget_bytes: int) -> Iterator[None]:
        import resource  # not on Windows

        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (budget_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)

    def held_bytes(self) -> int:
        return _status()["VmData"]

    def reset_peaks(self) -> None:
        # Where a container forbids it, the mark only ever rises: right for each larger batch.
        with contextlib.suppress(OSError):
            (PROC / "self" / "clear_refs").write_text(RESET_HIGH_WATER_MARK)

    def peaks(self) -> Peaks:
        status = _status()
        peak = status["VmHWM"] + status["VmData"] - status["VmRSS"]
        return Peaks(peak, peak)

    def allocation_retries(self) -> int:
        return 0

    def release_cache(self) -> None:
        # glibc keeps freed memory; other C libraries have no such call, and need none.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _fields(path: Path) -> dict[str, int]:
    """The sizes in a file of /proc such as ``VmRSS:  1234 kB``, in bytes."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        value = rest.split()
        if len(value) == 2 and value[1] == "kB":
            fields[name] = int(value[0]) * 1024
    return fields


def _status() -> dict[str, int]:
    return _fields(PROC / "self" / "status")


def _soft_limit() -> int | None:
    import resource  # not on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Limit and use of each control group that this process is in, in bytes."""
    try:
        groups = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one hierarchy, every ancestor may set a limit
            folder = CGROUP / path.lstrip("/")
            for group in (folder, *folder.parents):
                if CGROUP in (group, *group.parents):
                    yield from _limit(group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in (CGROUP / "memory" / path.lstrip("/"), CGROUP / "memory"):
                yield from _limit(
                    folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                )


def _limit(group: Path, limit: str, usage: str, reclaimable: str) -> Iterator[tuple[int, int]]:
    try:
        limit_bytes = int((group / limit).read_text())
        used_bytes = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max": no limit here
        return
    yield limit_bytes, max(0, used_bytes - int(stat.get(reclaimable, 0)))
