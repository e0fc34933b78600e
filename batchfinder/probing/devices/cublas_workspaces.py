"""The workspaces that cuBLAS keeps in the caching allocator's memory.

PyTorch keeps one for each thread that multiplies matrices, and the backward pass runs in a thread
of its own. The place of a workspace decides how much else fits. In a fresh process, the backward
pass puts its workspace into a hole that the first step's activations left. A step that finds the
workspace of an earlier probe proves nothing about a fresh process.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from batchfinder.units import MIB

# batchfinder.simulation.kernels.matrix_products says which GPUs use 32 MiB.
_USUAL_BYTES = {32 * MIB, 8_519_680}
_NO_POOL = (0, 0)


class CublasWorkspaces:
    """The workspaces that appear after this object was made.

    Earlier ones stay: another part of the program may be using them.
    """

    def __init__(self) -> None:
        sizes = _sizes()
        # Other allocators do not list their blocks.
        is_native = torch.cuda.get_allocator_backend() == "native"
        self._are_ours = (
            is_native
            and sizes is not None
            and not any(
                block["state"] == "active_allocated" and block["requested_size"] in sizes
                for segment in _segments()
                for block in segment["blocks"]
            )
        )

    def release(self) -> None:
        """Return the workspaces to the allocator.

        Keep them if there are CUDA graphs, which may have recorded their addresses.
        """
        if self._are_ours and all(s.get("segment_pool_id") == _NO_POOL for s in _segments()):
            torch._C._cuda_clearCublasWorkspaces()


def _segments() -> list[dict[str, Any]]:
    """Return what the allocator holds, on all devices."""
    return torch.cuda.memory_snapshot()  # type: ignore[no-any-return, no-untyped-call]


def _sizes() -> set[int] | None:
    """Return the possible sizes of a workspace in bytes; None if unknown."""
    read = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    if read is not None:  # PyTorch 2.12
        return {*_USUAL_BYTES, read()}
    return None if "CUBLAS_WORKSPACE_CONFIG" in os.environ else _USUAL_BYTES
