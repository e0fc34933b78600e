"""The table of errors that bound a batch size, every row with its source."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

_GITHUB = "https://github.com"
_PYTORCH = f"{_GITHUB}/pytorch/pytorch"
_PYTORCH_CODE = f"{_PYTORCH}/blob/main"
_PYTHON_EXCEPTIONS = "https://docs.python.org/3/library/exceptions.html"
# Lists the errors after which a process "must be terminated and relaunched" to go on with CUDA.
_CUDA_ERRORS = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"


class Tier(enum.Enum):
    """What a failure says about memory. Later members outrank earlier ones."""

    PROBABLE = "probable"
    """Often memory: free everything and repeat once before believing it."""
    CERTAIN = "certain"
    """Out of memory."""
    TOO_LARGE = "too_large"
    """A kernel cannot address this size. It bounds the size, but memory did not run out."""
    POISONED = "poisoned"
    """The device's context is broken, so only a new process helps. It bounds the size."""


@dataclass(frozen=True)
class Row:
    """One kind of failure, and how to recognize it.

    Attributes:
        tier: what it says about memory.
        pattern: regular expression to search in the text; "" if the type alone decides.
        source: where the text comes from, or a report that lack of memory raised it.
        types: the exceptions it counts in; empty if only a dying process prints it.
    """

    tier: Tier
    pattern: str
    source: str
    types: tuple[type[BaseException], ...] = (RuntimeError,)


TABLE: tuple[Row, ...] = (
    # torch.OutOfMemoryError is the same class, but PyTorch 2.4 has only this name.
    Row(Tier.CERTAIN, "", f"{_PYTORCH}/pull/121702", (torch.cuda.OutOfMemoryError,)),
    Row(Tier.CERTAIN, "", f"{_PYTHON_EXCEPTIONS}#MemoryError", (MemoryError,)),
    Row(Tier.CERTAIN, r"^[\w.]*MemoryError\b", f"{_PYTHON_EXCEPTIONS}#MemoryError", ()),
    # ENOMEM: the number is the same on Linux, macOS and Windows, the words are not.
    Row(Tier.CERTAIN, r"\[Errno 12\]", f"{_PYTHON_EXCEPTIONS}#OSError", (OSError,)),
    Row(Tier.CERTAIN, "CUDA out of memory", f"{_PYTORCH_CODE}/c10/cuda/CUDACachingAllocator.cpp"),
    Row(
        Tier.CERTAIN,
        "(CUDA|HIP) error: out of memory",
        f"{_PYTORCH_CODE}/c10/cuda/CUDAException.cpp",
    ),
    Row(
        Tier.CERTAIN,
        "CUDA driver error: out of memory",
        f"{_PYTORCH_CODE}/c10/cuda/driver_api.h",
    ),
    Row(
        Tier.CERTAIN,
        r"\bout of memory \(2\)",
        f"{_PYTORCH_CODE}/torch/cuda/__init__.py",
        (torch.cuda.CudaError,),
    ),
    Row(
        Tier.CERTAIN,
        r"Triton Error \[(CUDA|HIP)\]: out of memory",
        f"{_GITHUB}/triton-lang/triton/blob/main/third_party/nvidia/backend/driver.c",
    ),
    # NCCL has written the error's number since 2.19.
    Row(Tier.CERTAIN, r"Cuda failure (\d+ )?'out of memory'", f"{_GITHUB}/NVIDIA/nccl/issues/1235"),
    Row(Tier.CERTAIN, "HIP out of memory", f"{_PYTORCH}/issues/138002"),
    Row(Tier.CERTAIN, "XPU out of memory", f"{_GITHUB}/intel/torch-xpu-ops/issues/3011"),
    Row(
        Tier.CERTAIN,
        "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
        f"{_GITHUB}/open-edge-platform/physical-ai-studio/issues/440",
    ),
    Row(
        Tier.CERTAIN,
        "Allocation is out of device memory on current platform",
        f"{_GITHUB}/intel/ipex-llm/issues/10575",
    ),
    Row(Tier.CERTAIN, "NPU out of memory", f"{_GITHUB}/vllm-project/vllm-ascend/issues/19"),
    Row(
        Tier.CERTAIN,
        "MPS backend out of memory",
        f"{_PYTORCH_CODE}/aten/src/ATen/mps/MPSAllocator.mm",
    ),
    Row(
        Tier.CERTAIN,
        "MODULE:PT_DEVMEM Allocation failed",
        f"{_GITHUB}/huggingface/optimum-habana/issues/289",
    ),
    Row(Tier.CERTAIN, "DefaultCPUAllocator: can't allocate memory", f"{_PYTORCH}/pull/20618"),
    Row(Tier.CERTAIN, "DefaultCPUAllocator: not enough memory", f"{_PYTORCH}/pull/20618"),
    Row(Tier.CERTAIN, "std::bad_alloc", "https://en.cppreference.com/w/cpp/memory/new/bad_alloc"),
    Row(
        Tier.CERTAIN,
        "unable to mmap .*: Cannot allocate memory",
        f"{_PYTORCH_CODE}/aten/src/ATen/MapAllocator.cpp",
    ),
    # cuDNN 9 appends a detail to these names, as in CUDNN_STATUS_INTERNAL_ERROR_HOST_...
    Row(
        Tier.PROBABLE,
        "CUDNN_STATUS_(NOT_SUPPORTED|ALLOC_FAILED|INTERNAL_ERROR|EXECUTION_FAILED)",
        f"{_PYTORCH}/issues/81620",
    ),
    Row(Tier.PROBABLE, "(CU|HIP)BLAS_STATUS_ALLOC_FAILED", f"{_GITHUB}/QwenLM/Qwen3/issues/873"),
    Row(
        Tier.PROBABLE,
        "(CU|HIP)BLAS_STATUS_NOT_INITIALIZED",
        f"{_GITHUB}/EleutherAI/lm-evaluation-harness/issues/1689",
    ),
    # Of a workspace that is not available; a kernel of cuBLAS that fails otherwise breaks the
    # context, which the next look at the device shows.
    Row(
        Tier.PROBABLE,
        "(CU|HIP)BLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)",
        f"{_GITHUB}/deepspeedai/DeepSpeed/issues/294",
    ),
    Row(
        Tier.PROBABLE,
        "CUSOLVER_STATUS_INTERNAL_ERROR",
        f"{_GITHUB}/JuliaGPU/CUDA.jl/issues/1924",
    ),
    Row(Tier.PROBABLE, "CUFFT_INTERNAL_ERROR", f"{_PYTORCH}/issues/119420"),
    Row(Tier.PROBABLE, "CUFFT_ALLOC_FAILED", f"{_PYTORCH}/issues/6511"),
    Row(Tier.PROBABLE, "(GET|FIND) was unable to find an engine", f"{_PYTORCH}/issues/108645"),
    Row(
        Tier.PROBABLE,
        "Unable to find a valid cuDNN algorithm to run convolution",
        f"{_GITHUB}/marqo-ai/marqo/issues/101",
    ),
    Row(Tier.PROBABLE, "Invalid buffer size", f"{_PYTORCH}/issues/141909"),
    Row(
        Tier.PROBABLE,
        "can NOT allocate memory block with size larger than 4GB",
        f"{_GITHUB}/intel/intel-extension-for-pytorch/issues/492",
    ),
    Row(
        Tier.PROBABLE,
        "INTERNAL ASSERT FAILED.*CUDACachingAllocator",
        f"{_PYTORCH}/issues/185240",
    ),
    Row(Tier.PROBABLE, "NVML_SUCCESS == r INTERNAL ASSERT FAILED", f"{_PYTORCH}/issues/112377"),
    # "… primitive descriptor" is another failure: oneDNN has no such operation.
    Row(
        Tier.PROBABLE,
        "could not (create|execute) a primitive(?! descriptor)",
        f"{_PYTORCH}/issues/55884",
    ),
    # A thread's stack is memory too: seen under RLIMIT_DATA.
    Row(
        Tier.PROBABLE,
        "can't start new thread",
        f"{_GITHUB}/python/cpython/blob/main/Modules/_threadmodule.c",
    ),
    Row(
        Tier.PROBABLE,
        "libgomp: Thread creation failed",
        f"{_GITHUB}/gcc-mirror/gcc/blob/master/libgomp/team.c",
        (),
    ),
    # Tensors of more than 2**31 elements, and grids of more than 65535 blocks.
    Row(Tier.TOO_LARGE, "canUse32BitIndexMath", f"{_PYTORCH}/issues/80020"),
    Row(Tier.TOO_LARGE, "(less|more) than INT_MAX elements", f"{_PYTORCH}/issues/144855"),
    Row(
        Tier.TOO_LARGE,
        r"numel\(\) <= std::numeric_limits<int32_t>::max\(\)",
        f"{_PYTORCH}/issues/131185",
    ),
    Row(Tier.TOO_LARGE, "[Ii]nteger out of range", f"{_PYTORCH}/issues/113833"),
    Row(Tier.TOO_LARGE, "CUDA error: invalid configuration argument", f"{_PYTORCH}/issues/142228"),
    Row(Tier.POISONED, "illegal memory access", _CUDA_ERRORS),
    # Not just "device-side assert": every CUDA error of PyTorch ends with the advice to "enable
    # device-side assertions", an OOM too.
    Row(Tier.POISONED, "device-side assert triggered", _CUDA_ERRORS),
    Row(Tier.POISONED, "misaligned address", _CUDA_ERRORS),
    Row(Tier.POISONED, "unspecified launch failure", _CUDA_ERRORS),
    Row(Tier.POISONED, "an illegal instruction was encountered", _CUDA_ERRORS),
    Row(Tier.POISONED, "the launch timed out and was terminated", _CUDA_ERRORS),
    # Invalid addresses of code and stack end in these.
    Row(
        Tier.POISONED,
        "CUDA error: (invalid program counter|hardware stack error|operation not supported on "
        "global/shared address space)",
        _CUDA_ERRORS,
    ),
    Row(
        Tier.POISONED,
        "UR_RESULT_ERROR_OUT_OF_RESOURCES",
        f"{_GITHUB}/intel/torch-xpu-ops/issues/1324",
    ),
    Row(
        Tier.POISONED,
        "UR_RESULT_ERROR_DEVICE_LOST",
        f"{_GITHUB}/intel/torch-xpu-ops/issues/3155",
    ),
    Row(
        Tier.POISONED,
        "Memory access fault by GPU",
        f"{_GITHUB}/ROCm/legacy-rocm-build/issues/1262",
        (),
    ),
)
