"""The versions that a result depends on."""

from __future__ import annotations

import sys

import torch

from batchfinder.results.version import VERSION


def versions() -> dict[str, str]:
    """Return the versions of batchfinder, python, torch and, if built in, cuda or hip."""
    found = {
        "batchfinder": VERSION,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    return {name: version for name, version in found.items() if version}
