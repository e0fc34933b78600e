"""The CPU of a Linux machine: a real limit from the operating system, peaks from /proc.

The limit is ``RLIMIT_DATA``, which ``ulimit -d`` sets too. It counts private writable memory. At
the limit PyTorch raises an error and recovers, and the kernel kills no process. The peak is the
high-water mark of resident memory (``VmHWM``) plus the counted memory that is not resident;
``/proc/self/clear_refs`` resets the mark (https://docs.kernel.org/filesystems/proc.html). If a step
sets a new mark of all mapped memory (``VmPeak``), that is used instead, because it includes memory
that was requested but never written to.

glibc takes tensors of up to 32 MiB from a heap, where they leave holes. It starts to do so only
after some frees, which raise its threshold for mapping a tensor separately (mallopt(3)). Therefore
the second step needs more than the first, and a process fails at smaller sizes after an
out-of-memory error. The same step needs several percent more or less from run to run, tens of
percent if all tensors are small. Such runs cannot separate neighboring sizes, so every large probe
runs in its own process, a confirmation watches more steps, and the answer leaves room for the
spread.

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
from batchfinder.probing.devices.device import Device, DeviceMemory, Peaks

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
RESET_HIGH_WATER_MARK = "5"

# glibc maps twice this size for the heap of a new thread, then keeps the aligned half. Neither
# counts toward the limit before it is used (HEAP_MAX_SIZE in glibc's malloc/arena.c).
THREAD_HEAP_BYTES = 64 * 1024**2


class CpuDevice(Device):
    """See :class:`~batchfinder.probing.devices.device.Device`.

    Raises:
        DeviceError: this is not Linux, or /proc is not mounted.
    """

    torch_device = torch.device("cpu")
    name = "cpu"

    # The heap keeps holes where a failed step's tensors were. Smaller sizes then fail too.
    leaves_no_trace = False

    def __init__(self) -> None:
        self._mapped_peak_before = 0
        self._uncounted_before = 0
        if sys.platform != "linux":
            raise DeviceError(
                "on this system the CPU's memory cannot be limited, and running out of it would "
                "take the machine down. Try --device with an accelerator, or a Linux machine"
            )
        try:
            _status()
        except OSError as error:
            raise DeviceError(
                f"the memory of this process cannot be read ({error}). Try mounting /proc"
            ) from None

    def memory(self) -> DeviceMemory:
        status = _status()
        capacity, available = host_memory()
        held = status["VmData"]
        used_by_others = max(0, capacity - available - status["VmRSS"])
        soft_limit = _soft_limit()
        if soft_limit is not None and soft_limit < capacity:  # set by the user, for children too
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

    def in_use_bytes(self) -> int:
        read = _glibc("mallinfo2")  # since 2.33
        if read is None:
            return 0
        read.restype = _Mallinfo
        info = read()
        return int(info.uordblks + info.hblkhd)

    def reset_peaks(self) -> None:
        # Some containers forbid the reset. Then the mark only rises, which still suits larger
        # batches.
        with contextlib.suppress(OSError):
            (PROC / "self" / "clear_refs").write_text(RESET_HIGH_WATER_MARK)
        status = _status()
        self._mapped_peak_before = status["VmPeak"]
        self._uncounted_before = status["VmSize"] - status["VmData"]

    def peaks(self) -> Peaks:
        status = _status()
        peak = status["VmHWM"] + status["VmData"] - status["VmRSS"]
        if status["VmPeak"] > self._mapped_peak_before:
            # More is mapped than ever before. This shows the peak of what the limit counts,
            # including memory that was requested but not written to.
            uncounted = status["VmSize"] - status["VmData"]
            mapped = status["VmPeak"] - uncounted
            if uncounted > self._uncounted_before:  # perhaps the heap of a new thread
                mapped -= THREAD_HEAP_BYTES
            # Threads that start at the same moment map even more that does not count.
            peak = min(max(peak, mapped), _soft_limit() or sys.maxsize)
        return Peaks(peak, peak)

    def release_cache(self) -> None:
        trim = _glibc("malloc_trim")  # glibc keeps freed memory; other C libraries return it
        if trim is not None:
            trim(0)


def host_memory() -> tuple[int, int]:
    """Return the memory of this machine or container, and what is available of it, in bytes."""
    meminfo = _fields(PROC / "meminfo")
    capacity, available = meminfo["MemTotal"], meminfo["MemAvailable"]
    for limit, used in _cgroup_limits():
        capacity = min(capacity, limit)
        available = min(available, limit - used)
    return capacity, available


def _glibc(name: str) -> Any:
    """Return a function of glibc; None in older versions and other C libraries."""
    return getattr(ctypes.CDLL(None), name, None)


class _Mallinfo(ctypes.Structure):
    """What glibc reports about its heap and its separate mappings (mallinfo(3))."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    )


def _fields(path: Path) -> dict[str, int]:
    """Read the sizes in a file of /proc, such as ``VmRSS:  1234 kB``, in bytes."""
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
    """Yield the limit and the use of each control group of this process, in bytes."""
    try:
        groups = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one hierarchy in which every ancestor may set a limit
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
