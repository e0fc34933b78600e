"""The allocator memory that cuBLAS keeps after a thread's first matrix product.

PyTorch has a handle of cuBLAS for each thread and a workspace for each handle. The backward pass
runs in a thread of its own, so a training step has two.
Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp`` of PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from batchfinder.simulation.gpus import Gpu
from batchfinder.simulation.trace.recorder import Recorder
from batchfinder.simulation.trace.trace import Rule
from batchfinder.units import MIB

_aten: Any = torch.ops.aten
_WITH_BIAS = {_aten.addmm.default, _aten._addmm_activation.default}
PRODUCTS = _WITH_BIAS | {
    getattr(_aten, name).default
    for name in (
        "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "_scaled_mm",
        "_euclidean_dist",
    )
}  # fmt: skip
"""The operators that cuBLAS computes."""

# Older versions let cuBLAS allocate from the device: https://github.com/pytorch/pytorch/pull/83461
_FROM_THE_ALLOCATOR_SINCE = (2, 0)
# cuBLASLt multiplies where there is a bias. Since 2.12 it shares the workspace of cuBLAS, as
# scripts/counting_cuda shows on 2.11 and 2.12: https://github.com/pytorch/pytorch/pull/168175
_SHARED_SINCE = (2, 12)
# Blackwell has Hopper's size since https://github.com/pytorch/pytorch/pull/175344; also measured.
_LARGE_ON_BLACKWELL_SINCE = (2, 12)
_LARGE_BYTES, _USUAL_BYTES = 32 * MIB, 8_519_680


def workspace_bytes(gpu: Gpu, torch_version: tuple[int, int]) -> int:
    """Return the bytes that a handle of cuBLAS allocates and keeps.

    https://docs.nvidia.com/cuda/cublas/#results-reproducibility

    Example:
        >>> from batchfinder.simulation.gpus import find_gpu
        >>> [workspace_bytes(find_gpu(name), (2, 11)) for name in ("rtx3090", "h100", "b200")]
        [8519680, 33554432, 8519680]
    """
    blackwell = {10, 12} if torch_version >= _LARGE_ON_BLACKWELL_SINCE else set()
    is_large = gpu.compute_capability[0] in {9} | blackwell
    return _LARGE_BYTES if is_large else _USUAL_BYTES


class MatrixProducts:
    """Notes the workspaces at the first product of each thread. Use one instance per trace."""

    def __init__(self, torch_version: tuple[int, int]) -> None:
        self._version = torch_version
        self._noted: set[tuple[str, bool]] = set()

    def note(self, recorder: Recorder, func: Any) -> None:
        """Note the memory that the libraries allocate for one of :data:`PRODUCTS`."""
        if self._version < _FROM_THE_ALLOCATOR_SINCE:
            return
        if self._is_first("cublas"):
            needed = Rule((1,), lambda handles, gpu: handles * workspace_bytes(gpu, self._version))
            recorder.begin_transient(needed)  # it is never freed
        if func in _WITH_BIAS and self._version < _SHARED_SINCE and self._is_first("cublaslt"):
            recorder.begin_transient(MIB)

    def _is_first(self, library: str) -> bool:
        key = (library, torch._C._current_autograd_node() is not None)
        is_first = key not in self._noted
        self._noted.add(key)
        return is_first


def quantized_sizes(func: OpOverload, args: Any, output: Any) -> list[int]:
    """Return the bytes of the weight that a 4-bit product of bitsandbytes dequantizes.

    It has the input's dtype. Below 1536 rows, some GPUs run a kernel that does not dequantize; the
    weight is counted anyway. With double quantization, the scales are dequantized first, and an
    offset is added.
    https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/backends/cuda/ops.py
    """
    if func._opname == "gemm_4bit":
        inputs, _, (rows, columns), _, block = args[:5]
        scales = rows * columns // block * 4
        is_nested = len(args) > 7 and args[7] is not None
        nested = [scales, scales] if is_nested else []
        return [*nested, rows * columns * inputs.element_size()]
    if func._opname == "int8_scaled_mm":
        return [output.numel() * 4]  # the product in int32
    return []
