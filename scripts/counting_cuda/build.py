#!/usr/bin/env python3
"""Build the counting CUDA runtime for the PyTorch of the Python that runs this.

    python scripts/counting_cuda/build.py FOLDER

Needs PyTorch for CUDA 13 from PyPI (whose packages bring the headers), g++ and nm. Prints the
libraries, separated by colons, as LD_PRELOAD takes them. Nothing outside the folder is written.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent
# Its name, what it is made of, and what decides which half of a source is meant.
LIBRARIES = (
    ("libcudart.so.13", ("memory.cpp", "device.cpp"), ""),
    ("libcublas.so.13", ("blas.cpp",), "-DCOUNTING_CUBLAS"),
    ("libcublasLt.so.13", ("blas.cpp",), ""),
    ("libcuda.so.1", ("driver.cpp",), ""),
    ("libnvidia-ml.so.1", ("nvml.cpp",), ""),
)
# PyTorch's one library that is linked to the driver's.
LINKED_TO_DRIVER = "libcaffe2_nvrtc.so"


def main() -> None:
    """Build what is not there yet, or older than its sources."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    packages = find_packages()
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir() if path.is_file())
    built = [folder / name for name, _, _ in LIBRARIES]
    if not all(path.exists() and path.stat().st_mtime > newest for path in built):
        needed = needed_symbols(packages)
        for name, sources, option in LIBRARIES:
            build(folder, name, sources, option, needed[name], packages)
    print(":".join(map(str, built)))


def find_packages() -> Path:
    """The folder in which PyTorch and NVIDIA's packages are installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("this Python has no PyTorch")
    packages = Path(spec.origin).parents[1]
    if not (packages / "nvidia/cu13/include/cuda_runtime_api.h").exists():
        sys.exit(f"the PyTorch in {packages} is none for CUDA 13 from PyPI")
    return packages


def needed_symbols(packages: Path) -> dict[str, set[str]]:
    """The functions of each library that PyTorch, bitsandbytes and NVIDIA ask for."""
    needed: dict[str, set[str]] = {name: set() for name, _, _ in LIBRARIES}
    libraries = [*packages.glob("torch/lib/*.so"), *packages.glob("nvidia/**/lib/*.so*")]
    libraries += packages.glob("bitsandbytes/*_cuda13*.so")
    for library in libraries:
        if library.name in needed:
            continue
        for symbol in symbols(library, "--undefined-only"):
            function, _, version = symbol.partition("@")
            if version in needed:
                needed[version].add(function)
            elif library.name == LINKED_TO_DRIVER and re.match(r"cu[A-Z]", symbol):
                needed["libcuda.so.1"].add(function)
    return needed


def symbols(library: Path, option: str) -> Iterator[str]:
    """The dynamic symbols of a library, with their versions."""
    listed = subprocess.run(
        ["nm", "-D", "--just-symbols", option, str(library)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return iter(listed.stdout.split())


def build(
    folder: Path, name: str, sources: tuple[str, ...], option: str, needed: set[str], packages: Path
) -> None:
    """Build one library: what its sources define, and for all other functions "success"."""
    # Headers that NVIDIA's package leaves out come with Triton.
    headers = [packages / "nvidia/cu13/include", packages / "triton/backends/nvidia/include"]
    compiler = ["g++", "-O1", "-w", "-fPIC", "-shared", "-static-libstdc++"]
    compiler += [f"-I{folder}" for folder in headers] + ([option] if option else [])
    paths = [str(SOURCES / source) for source in sources]
    library = folder / name
    subprocess.run([*compiler, *paths, "-o", str(library)], check=True)
    defined = set(symbols(library, "--defined-only"))
    rest = folder / f"{name}.rest.cpp"
    rest.write_text(
        "".join(
            f'extern "C" int {function}() {{ return 0; }}\n'
            for function in sorted(needed - defined)
        )
    )
    versions = folder / f"{name}.map"
    versions.write_text(f"{name.replace('-', '_')} {{ global: *; }};\n")
    subprocess.run(
        [*compiler, *paths, str(rest), "-o", str(library), f"-Wl,-soname,{name}",
         f"-Wl,--version-script,{versions}"],
        check=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
