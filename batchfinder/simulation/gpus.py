"""The GPUs that can be simulated, read from ``gpus.toml``."""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from batchfinder.errors import UsageError
from batchfinder.units import GIB, MIB

# The standard library reads TOML since Python 3.11; before, its model, tomli, does.
_toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

# CUDA of the builds that PyTorch has published since lazy loading; what --gpu means by default.
CURRENT_CUDA = (12, 8)


@dataclass(frozen=True)
class Gpu:
    """A GPU on paper.

    Attributes:
        name: as its maker writes it.
        total_bytes: what PyTorch reports as total memory.
        compute_capability: such as ``(8, 6)``.
        overhead_bytes: what a process takes outside the allocator: context, kernels, handles.
        threads: that are on all multiprocessors at once; kernels share their work by it.
        source: where the total was read; "" if it was not.
        overhead_source: where the overhead was read; "" if it was not.

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


NO_GPU = Gpu("", 0, (0, 0), 0, 0)
"""None in particular."""


def all_gpus(cuda: tuple[int, int] = CURRENT_CUDA) -> tuple[Gpu, ...]:
    """Every GPU known, in the order of the file.

    Args:
        cuda: the version of CUDA that PyTorch is built with; the overhead depends on it.
    """
    return tuple(_to_gpu(row, cuda) for row in _tables()["gpu"])


def find_gpu(name: str, cuda: tuple[int, int] = CURRENT_CUDA) -> Gpu:
    """The GPU of a name; case, spaces and punctuation do not matter.

    Args:
        name: such as ``"rtx3090"`` or ``"A100 80GB"``.
        cuda: see :func:`all_gpus`.

    Raises:
        UsageError: there is none; names the nearest.
    """
    rows = {
        _key(spelling): row
        for row in _tables()["gpu"]
        for spelling in (row["name"], *row.get("aliases", ()))
    }
    key = _key(name)
    for spelling in (key, f"rtx{key}"):
        if spelling in rows:
            return _to_gpu(rows[spelling], cuda)
    near = difflib.get_close_matches(key, rows, n=4, cutoff=0.5)
    names = list(dict.fromkeys(rows[match]["name"] for match in near))
    hint = f"did you mean {' or '.join(names)}? " if names else ""
    raise UsageError(
        f"no GPU {name!r} is known; {hint}`batchfinder gpus` lists them, and --memory 24GiB "
        "stands for any other"
    )


def unnamed_gpu(total_bytes: int, cuda: tuple[int, int] = CURRENT_CUDA) -> Gpu:
    """A GPU of which only the memory is known; it chooses kernels as an RTX 3090 does.

    Args:
        total_bytes: its memory.
        cuda: see :func:`all_gpus`.
    """
    known = next(row for row in _tables()["gpu"] if row["name"] == "RTX 3090")
    return _to_gpu(known | {"name": "any GPU", "total_gib": total_bytes / GIB, "source": ""}, cuda)


def nccl_bytes(world_size: int) -> int:
    """What NCCL takes of each GPU for a group of so many ranks.

    Example:
        >>> nccl_bytes(64) // 2**20
        688
    """
    rows = _tables()["nccl"]
    row = next(row for row in rows if world_size <= row.get("most_ranks", world_size))
    return int(row["mib"]) * MIB


def _to_gpu(row: dict[str, Any], cuda: tuple[int, int]) -> Gpu:
    capability = row["compute_capability"]
    overhead = next(rule for rule in _tables()["overhead"] if _holds(rule, capability, cuda))
    return Gpu(
        name=row["name"],
        total_bytes=round(row["total_gib"] * GIB),
        compute_capability=_version(capability),
        overhead_bytes=round(overhead["gib"] * GIB),
        threads=row["multiprocessors"] * _tables()["threads"][capability],
        source=row.get("source", ""),
        overhead_source=overhead.get("source", ""),
    )


def _holds(rule: dict[str, Any], capability: str, cuda: tuple[int, int]) -> bool:
    before = rule.get("before_cuda")
    return (before is None or cuda < _version(before)) and (
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
