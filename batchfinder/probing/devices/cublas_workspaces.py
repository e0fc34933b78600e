"""The workspaces that cuBLAS keeps of the caching allocator's memory.

PyTorch has one for each thread that multiplies matrices, and keeps it; the backward pass runs in a
thread of its own. Where they come to lie decides how much else fits: in a fresh process, that of
the backward pass takes a hole that the first step's activations left. A step that finds them there
already, from an earlier probe, proves nothing of a fresh process.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from batchfinder.units import MIB

# On which GPUs 32 MiB: see batchfinder.simulation.kernels.matrix_products.
_USUAL_BYTES = {32 * MIB, 8_519_680}
_NO_POOL = (0, 0)


class CublasWorkspaces:
    """Those that come while this is there.

    Workspaces that were there before stay: another part of the program may be using them.
    """

    def __init__(self) -> None:
        sizes = _sizes()
        # Other allocators do not tell their blocks.
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
        """Give them back to the allocator.

        Not where there are CUDA graphs: they may have recorded where a workspace lies.
        """
        if self._are_ours and all(s.get("segment_pool_id") == _NO_POOL for s in _segments()):
            torch._C._cuda_clearCublasWorkspaces()


def _segments() -> list[dict[str, Any]]:
    """What the allocator holds, on all devices."""
    return torch.cuda.memory_snapshot()  # type: ignore[no-any-return, no-untyped-call]


def _sizes() -> set[int] | None:
    """The bytes that a workspace may have; None where they cannot be known."""
    read = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    if read is not None:  # PyTorch 2.12
        return {*_USUAL_BYTES, read()}
    return None if "CUBLAS_WORKSPACE_CONFIG" in os.environ else _USUAL_BYTES
