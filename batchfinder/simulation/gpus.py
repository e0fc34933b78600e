"""The GPUs that can be simulated, read from ``gpus.toml``."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from batchfinder.errors import UsageError, did_you_mean
from batchfinder.units import GIB, MIB

# The standard library reads TOML since Python 3.11; before that, the package tomli does.
_toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

# The default CUDA version for --gpu. Current PyTorch builds use it, and load kernels lazily.
CURRENT_CUDA = (12, 8)

# The source of an overhead that the user gives, which covers all that a process needs.
GIVEN = "--overhead"

# The name of a GPU that is given by its memory alone, and the one whose kernels it has.
_ANY_GPU, _LIKE = "any GPU", "RTX 3090"


@dataclass(frozen=True)
class Gpu:
    """A GPU to simulate.

    Attributes:
        name: the maker's name.
        total_bytes: total memory, as PyTorch reports it.
        compute_capability: the compute capability, such as ``(8, 6)``.
        overhead_bytes: memory of a process outside the allocator: context, kernels, handles.
        threads: resident threads on all multiprocessors; some kernels size their workspace by it.
        source: source of the total; "" if there is none.
        overhead_source: source of the overhead; "" if there is none.

    Example:
        >>> gpu = find_gpu("rtx3090")
        >>> gpu.name, gpu.compute_capability, round(gpu.total_bytes / 2**30, 1)
        ('RTX 3090', (8, 6), 23.7)
    """

    name: str
    total_bytes: int
    compute_capability: tuple[int, int]
    overhead_bytes: int
    threads: int
    source: str = ""
    overhead_source: str = ""

    @property
    def assumption(self) -> str:
        """What is assumed of a GPU of which only the memory is known; "" for others."""
        if self.name != _ANY_GPU:
            return ""
        return (
            f"of {_ANY_GPU}, only the memory is known. Assumed are the kernels of an {_LIKE}, and "
            "its overhead if no --overhead is given. Try --gpu NAME, with --memory if its memory "
            "differs"
        )


NO_GPU = Gpu("", 0, (0, 0), 0, 0)
"""A placeholder where the GPU does not matter."""


def all_gpus() -> tuple[Gpu, ...]:
    """Return every known GPU, in the order of the file."""
    return tuple(_to_gpu(row) for row in _tables()["gpu"])


def find_gpu(name: str | Gpu, cuda: tuple[int, int] = CURRENT_CUDA) -> Gpu:
    """Find a GPU by its name; case, spaces and punctuation do not matter.

    Args:
        name: the GPU's name, such as ``"rtx3090"`` or ``"A100 80GB"``. A GPU is returned as it is.
        cuda: the CUDA version of the PyTorch build, which decides the overhead.

    Raises:
        UsageError: the name is unknown.
    """
    if isinstance(name, Gpu):
        return name
    rows = {
        _key(spelling): row
        for row in _tables()["gpu"]
        for spelling in (row["name"], *row.get("aliases", ()))
    }
    key = _key(name)
    for spelling in (key, f"rtx{key}"):
        if spelling in rows:
            return _to_gpu(rows[spelling], cuda)
    hint = did_you_mean(key, rows, lambda spelling: str(rows[spelling]["name"]), otherwise=".")
    raise UsageError(
        f"no GPU {name!r} is known{hint} Try batchfinder gpus for the list, or --memory 24GiB for "
        "any other GPU."
    )


def unnamed_gpu(total_bytes: int) -> Gpu:
    """Make a GPU from its total memory. It uses the kernels of an RTX 3090."""
    known = next(row for row in _tables()["gpu"] if row["name"] == _LIKE)
    return _to_gpu(known | {"name": _ANY_GPU, "total_gib": total_bytes / GIB, "source": ""})


def of_rank(gpu: Gpu, world_size: int) -> Gpu:
    """Return the GPU of a rank: its overhead has NCCL's buffers, unless the user gave all of it."""
    nccl = 0 if gpu.overhead_source == GIVEN else nccl_bytes(world_size)
    return replace(gpu, overhead_bytes=gpu.overhead_bytes + nccl)


def nccl_bytes(world_size: int) -> int:
    """Return the memory that NCCL uses on each GPU of a group, in bytes.

    Example:
        >>> nccl_bytes(64) // 2**20
        688
    """
    rows = _tables()["nccl"]
    row = next(row for row in rows if world_size <= row.get("most_ranks", world_size))
    return int(row["mib"]) * MIB


def _to_gpu(row: dict[str, Any], cuda: tuple[int, int] = CURRENT_CUDA) -> Gpu:
    capability = row["compute_capability"]
    threads = _tables()["threads"]
    overhead = next(rule for rule in _tables()["overhead"] if _holds(rule, capability, cuda))
    return Gpu(
        name=row["name"],
        total_bytes=round(row["total_gib"] * GIB),
        compute_capability=_version(capability),
        overhead_bytes=round(overhead["gib"] * GIB),
        threads=row["multiprocessors"] * threads.get(capability, threads["default"]),
        source=row.get("source", ""),
        overhead_source=overhead.get("source", ""),
    )


def _holds(rule: dict[str, Any], capability: str, cuda: tuple[int, int]) -> bool:
    first, before = rule.get("from_cuda", "0.0"), rule.get("before_cuda", "999.0")
    return _version(first) <= cuda < _version(before) and (
        rule.get("compute_capability", capability) == capability
    )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _key(name: str) -> str:
    text = re.sub(r"nvidia|geforce|amd|instinct|[^a-z0-9]", "", name.lower())
    return text.replace("gib", "gb")


@cache
def _tables() -> dict[str, Any]:
    text = files("batchfinder.simulation").joinpath("gpus.toml").read_text("utf-8")
    tables: dict[str, Any] = _toml.loads(text)
    return tables
