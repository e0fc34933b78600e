"""The peak memory of this process on Linux, from /proc. Imports no other batchfinder.

The hook of ``batchfinder run`` loads this file in the user's script. What counts is what
``RLIMIT_DATA`` limits, private writable memory. The peak is the high-water mark of resident memory
(``VmHWM``) plus the counted memory that is not resident; ``/proc/self/clear_refs`` resets the mark
(https://docs.kernel.org/filesystems/proc.html). If a step sets a new mark of all mapped memory
(``VmPeak``), that is used instead, because it includes memory that was requested but never written
to.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

PROC = Path("/proc")
RESET_HIGH_WATER_MARK = "5"

# glibc maps twice this size for the heap of a new thread, then keeps the aligned half. Neither
# counts toward the limit before it is used (HEAP_MAX_SIZE in glibc's malloc/arena.c).
THREAD_HEAP_BYTES = 64 * 1024**2


class ProcessPeak:
    """The most counted memory of this process since the last reset."""

    def __init__(self) -> None:
        self._mapped_before = self._uncounted_before = 0

    def reset(self) -> None:
        """Start a new peak."""
        # Some containers forbid the reset. Then the mark only rises, which still suits larger
        # batches.
        with contextlib.suppress(OSError):
            (PROC / "self" / "clear_refs").write_text(RESET_HIGH_WATER_MARK)
        sizes = status()
        self._mapped_before = sizes["VmPeak"]
        self._uncounted_before = sizes["VmSize"] - sizes["VmData"]

    def read(self) -> int:
        """Return the peak in bytes."""
        sizes = status()
        peak = sizes["VmHWM"] + sizes["VmData"] - sizes["VmRSS"]
        if sizes["VmPeak"] > self._mapped_before:
            # More is mapped than ever before. This shows the peak of what the limit counts,
            # including memory that was requested but not written to.
            uncounted = sizes["VmSize"] - sizes["VmData"]
            mapped = sizes["VmPeak"] - uncounted
            if uncounted > self._uncounted_before:  # perhaps the heap of a new thread
                mapped -= THREAD_HEAP_BYTES
            # Threads that start at the same moment map even more that does not count.
            peak = min(max(peak, mapped), soft_limit() or sys.maxsize)
        return peak


def status() -> dict[str, int]:
    """Return the sizes in /proc/self/status, in bytes."""
    return sizes_in(PROC / "self" / "status")


def sizes_in(path: Path) -> dict[str, int]:
    """Return the sizes in a file of /proc, such as ``VmRSS:  1234 kB``, in bytes."""
    sizes = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        value = rest.split()
        if len(value) == 2 and value[1] == "kB":
            sizes[name] = int(value[0]) * 1024
    return sizes


def soft_limit() -> int | None:
    """Return the limit on counted memory in bytes; None if there is none."""
    import resource  # not on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft
