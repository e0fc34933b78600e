"""The CPU of a Linux machine: a real limit from the operating system, peaks from /proc.

The limit is ``RLIMIT_DATA``, which ``ulimit -d`` sets too. It counts private writable memory. At
the limit PyTorch raises an error and recovers, and the kernel kills no process.

glibc takes tensors of up to 32 MiB from a heap, where they leave holes. It starts to do so only
after some frees, which raise its threshold for mapping a tensor separately (mallopt(3)). Therefore
the second step needs more than the first, and a process fails at smaller sizes after an
out-of-memory error. The same step needs several percent more or less from run to run, tens of
percent if all tensors are small. Once the largest tensors pass 32 MiB they leave no holes: of one
training, sizes from 51 to 63 failed, and from 66 to 92 trained. Such runs cannot separate
neighboring sizes, so every large probe runs in its own process, a confirmation watches more steps,
and the answer leaves room for the spread.

With GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1048576:glibc.malloc.hugetlb=1 for the search and
for training, glibc 2.35 maps each tensor of 1 MiB or more separately, which leaves no holes. Most
models then train at larger sizes, and steps take 1.1 to 1.4 times as long
(scripts/results/README.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from batchfinder.errors import DeviceError
from batchfinder.probing.devices import process_peak
from batchfinder.probing.devices.device import Device, DeviceMemory, Peaks
from batchfinder.probing.steadiness import LEAK_BYTES, VARIED_STEPS

CGROUP = Path("/sys/fs/cgroup")

# oneDNN, which runs convolutions and bf16 products on the CPU, keeps a kernel for each shape, up to
# 1024 (https://uxlfoundation.github.io/oneDNN/dev_guide_primitive_cache.html). They break up the
# heap: a speech recognizer's process needed 977 MiB in its first step of 10 examples, and 1573 MiB
# in its 160th. With this setting, steps of 6 needed 937 MiB in the 7th and 935 MiB in the 55th, and
# they were as fast.
ONE_KERNEL = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


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
        self._peak = process_peak.ProcessPeak()
        if sys.platform != "linux":
            raise DeviceError(
                "on this system the CPU's memory cannot be limited, and running out of it would "
                "take the machine down. Try --device with an accelerator, or a Linux machine"
            )
        try:
            process_peak.status()
        except OSError as error:
            raise DeviceError(
                f"the memory of this process cannot be read ({error}). Try mounting /proc"
            ) from None

    def memory(self) -> DeviceMemory:
        status = process_peak.status()
        capacity, available = host_memory()
        held = status["VmData"]
        used_by_others = max(0, capacity - available - status["VmRSS"])
        soft_limit = process_peak.soft_limit()
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
        return process_peak.status()["VmData"]

    def in_use_bytes(self) -> int:
        read = _glibc("mallinfo2")  # since 2.33
        if read is None:
            return 0
        read.restype = _Mallinfo
        info = read()
        return int(info.uordblks + info.hblkhd)

    def reset_peaks(self) -> None:
        self._peak.reset()

    def peaks(self) -> Peaks:
        peak = self._peak.read()
        return Peaks(peak, peak)

    def release_cache(self) -> None:
        trim = _glibc("malloc_trim")  # glibc keeps freed memory; other C libraries return it
        if trim is not None:
            trim(0)

    def shapes_warning(self, in_use_bytes: Sequence[int]) -> str:
        *before, last = in_use_bytes[:: VARIED_STEPS - 1] or [0]  # after the same batch
        kept = last - before[0] if before else 0
        if kept < LEAK_BYTES or os.environ.get(ONE_KERNEL) or not torch.backends.mkldnn.enabled:
            return ""
        return (
            "each new shape of a batch leaves memory in use, as kernels that oneDNN keeps. It "
            "breaks up the heap, so a long training needs more than these steps, and may die at "
            f"the answer. Set {ONE_KERNEL}=1 for the search and for your run"
        )


def host_memory() -> tuple[int, int]:
    """Return the memory of this machine or container, and what is available of it, in bytes."""
    meminfo = process_peak.sizes_in(process_peak.PROC / "meminfo")
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

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the use of each control group of this process, in bytes."""
    try:
        groups = (process_peak.PROC / "self" / "cgroup").read_text().splitlines()
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
