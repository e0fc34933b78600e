"""The CPU of a Linux machine: a real limit from the operating system, peaks from /proc.

The limit is ``RLIMIT_DATA``, the one that ``ulimit -d`` sets. It counts private writable memory,
and when it is reached PyTorch raises an error that it recovers from, instead of the kernel killing
some process. The peak is the resident set's high-water mark (``VmHWM``), which ``/proc/self/
clear_refs`` resets (https://docs.kernel.org/filesystems/proc.html), corrected by how much of the
counted memory is not resident; or, where a step sets a new mark, that of all mapped memory
(``VmPeak``), which sees what was asked for but never written to.

glibc takes tensors of up to 32 MiB from a heap, where they leave holes, but only after a while: its
threshold for mapping a tensor separately rises with what was freed (mallopt(3)). So the second
step needs more than the first, an out-of-memory error leaves its process with a heap that fails
earlier, and the same step needs several percent more or less from run to run, tens of percent where
all tensors are small. Neighboring sizes cannot be told apart then: every large probe runs in a
process of its own, a confirmation watches more steps, and the answer leaves room for the spread.

With GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1 for the search and
for training, glibc 2.35 maps each tensor of 1 MiB or more separately, which leaves no holes. Most
models then train at larger sizes, and steps take 1.1 to 1.4 times as long
(scripts/results/README.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from batchfinder.errors import DeviceError
from batchfinder.probing.devices.device import DeviceMemory, Peaks

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
RESET_HIGH_WATER_MARK = "5"

# For the heap of a new thread glibc maps twice so much for an instant, and keeps what is aligned;
# neither counts towards the limit until it is used (HEAP_MAX_SIZE in glibc's malloc/arena.c).
THREAD_HEAP_BYTES = 64 * 1024**2


class CpuDevice:
    """See :class:`~batchfinder.probing.devices.device.Device`.

    Raises:
        DeviceError: this is not Linux, or /proc is not there.
    """

    torch_device = torch.device("cpu")
    name = "cpu"
    limit_warning: str | None = None

    # The heap keeps holes where a failed step's tensors lay: smaller sizes then fail as well.
    leaves_no_trace = False

    def __init__(self) -> None:
        self._mapped_peak_before = 0
        self._uncounted_before = 0
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

    def allowed_share(self) -> float:
        return 1.0  # a limit of the user's own holds for child processes too

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

    def kept_bytes(self) -> int:
        return self.held_bytes()

    def in_use_bytes(self) -> int:
        read = _glibc("mallinfo2")  # since 2.33
        if read is None:
            return 0
        read.restype = _Mallinfo
        info = read()
        return int(info.uordblks + info.hblkhd)

    def reset_peaks(self) -> None:
        # Where a container forbids it, the mark only ever rises: right for each larger batch.
        with contextlib.suppress(OSError):
            (PROC / "self" / "clear_refs").write_text(RESET_HIGH_WATER_MARK)
        status = _status()
        self._mapped_peak_before = status["VmPeak"]
        self._uncounted_before = status["VmSize"] - status["VmData"]

    def peaks(self) -> Peaks:
        status = _status()
        peak = status["VmHWM"] + status["VmData"] - status["VmRSS"]
        if status["VmPeak"] > self._mapped_peak_before:
            # All that is mapped was never so much before: that shows the peak of what the limit
            # counts, memory that was asked for but not written to included.
            uncounted = status["VmSize"] - status["VmData"]
            mapped = status["VmPeak"] - uncounted
            if uncounted > self._uncounted_before:  # by the heap of a new thread, it may be
                mapped -= THREAD_HEAP_BYTES
            # Threads that started at the same instant have mapped even more that does not count.
            peak = min(max(peak, mapped), _soft_limit() or sys.maxsize)
        return Peaks(peak, peak)

    def allocation_retries(self) -> int:
        return 0

    def release_cache(self) -> None:
        trim = _glibc("malloc_trim")  # which keeps freed memory; others need no such call
        if trim is not None:
            trim(0)


def _glibc(name: str) -> Any:
    """A function of glibc; None in older ones and in other C libraries."""
    return getattr(ctypes.CDLL(None), name, None)


class _Mallinfo(ctypes.Structure):
    """What glibc tells of its heap and of what it has mapped apart (mallinfo(3))."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    )


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
