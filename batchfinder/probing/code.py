"""Digests of the user's code files, and the settings around them. Imports no torch."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# Prefixes of environment variables that change a step's memory or its device.
_SETTINGS = (
    *("PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "CUDA_", "CUBLAS", "CUDNN_", "NVIDIA_", "NCCL_"),
    *("HIP_", "ROCR_", "XLA_", "MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "OMP_", "MKL_"),
    *("OPENBLAS_", "ACCELERATE_"),
)
# Set in any process that has compiled something. It does not affect memory.
_NO_SETTINGS = ("TORCHINDUCTOR_CACHE_DIR",)

_DRIVER = Path("/proc/driver/nvidia")

# Larger files are identified by size and modification time, because reading them takes longer than
# a probe. In bytes.
MOST_BYTES = 64 * 1024**2

_OURS = Path(__file__).parents[1]
_INSTALLED = tuple(
    Path(path).resolve()
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)

# Files in these folders describe the machine and its current state.
_SYSTEM = tuple(map(Path, ("/proc", "/sys", "/dev", "/etc", "/run")))


def digests(files: Iterable[str]) -> dict[str, str]:
    """Return a digest of each file by path, except files of Python and installed packages.

    Files that cannot be read are left out.
    """
    found = {}
    for file in sorted(set(files)):
        path = Path(os.path.realpath(file))
        if _is_users(path) and (digest := digest_of(path)):
            found[str(path)] = digest
    return found


def files_of_command(words: Sequence[str]) -> Iterator[str]:
    """Yield the files that a command's answer depends on, as far as its words show them.

    These are the files that it names, also as ``key=FILE``, and the Python files in the folders of
    its scripts and below. With ``-m MODULE``, that is the current folder. Configurations there do
    not count: trainings write their own.
    """
    parts = [part for word in words for part in (word, word.partition("=")[2])]
    named = [part for part in parts if os.path.isfile(part)]  # noqa: PTH113 - code of -c is long
    yield from named
    tops = {Path(name).parent for name in named if name.endswith(".py")}
    if "-m" in words:
        tops.add(Path())
    for top in tops:
        for name, folders, files in os.walk(top):
            if "pyvenv.cfg" in files or name.endswith(("site-packages", "node_modules")):
                folders.clear()
                continue
            folders[:] = [folder for folder in folders if not folder.startswith((".", "__"))]
            yield from (str(Path(name, file)) for file in files if file.endswith(".py"))


def digest_of(path: Path) -> str:
    """Return a digest of a file's content; "" if it cannot be read."""
    try:
        status = path.stat()
        if status.st_size > MOST_BYTES:
            return f"{status.st_size} {status.st_mtime_ns}"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def surroundings() -> dict[str, str]:
    """Return the settings that memory depends on: variables, C library, driver, processors."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_SETTINGS) and name not in _NO_SETTINGS
    }
    affinity = getattr(os, "sched_getaffinity", None)
    gpus = sorted(_DRIVER.glob("gpus/*/information"))
    return {
        **kept,
        "libc": " ".join(platform.libc_ver()),
        "driver": " ".join(filter(None, map(digest_of, (_DRIVER / "version", *gpus)))),
        "processors": str(len(affinity(0)) if affinity else os.cpu_count()),
    }


def _is_users(path: Path) -> bool:
    parts = {"site-packages", "dist-packages"} & {*path.parts}
    return not parts and not any(
        folder in path.parents for folder in (_OURS, *_INSTALLED, *_SYSTEM)
    )
