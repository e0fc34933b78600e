"""The table of errors that bound a batch size, every row with its source."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

_GITHUB = "https://github.com/"
_PYTORCH = f"{_GITHUB}pytorch/pytorch"
_CODE = "pytorch/pytorch/blob/main"
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


# The texts of exceptions of PyTorch and the drivers, which are RuntimeErrors, with their sources. A
# source is on GitHub, unless it is a whole address.
_TEXTS: dict[Tier, dict[str, str]] = {
    Tier.CERTAIN: {
        "CUDA out of memory": f"{_CODE}/c10/cuda/CUDACachingAllocator.cpp",
        "(CUDA|HIP) error: out of memory": f"{_CODE}/c10/cuda/CUDAException.cpp",
        "CUDA driver error: out of memory": f"{_CODE}/c10/cuda/driver_api.h",
        r"Triton Error \[(CUDA|HIP)\]: out of memory": (
            "triton-lang/triton/blob/main/third_party/nvidia/backend/driver.c"
        ),
        # NCCL has written the error's number since 2.19.
        r"Cuda failure (\d+ )?'out of memory'": "NVIDIA/nccl/issues/1235",
        "HIP out of memory": "pytorch/pytorch/issues/138002",
        "XPU out of memory": "intel/torch-xpu-ops/issues/3011",
        "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY": "open-edge-platform/physical-ai-studio/issues/440",
        "Allocation is out of device memory on current platform": "intel/ipex-llm/issues/10575",
        "NPU out of memory": "vllm-project/vllm-ascend/issues/19",
        "MPS backend out of memory": f"{_CODE}/aten/src/ATen/mps/MPSAllocator.mm",
        "MODULE:PT_DEVMEM Allocation failed": "huggingface/optimum-habana/issues/289",
        "DefaultCPUAllocator: can't allocate memory": "pytorch/pytorch/pull/20618",
        "DefaultCPUAllocator: not enough memory": "pytorch/pytorch/pull/20618",
        "std::bad_alloc": "https://en.cppreference.com/w/cpp/memory/new/bad_alloc",
        "unable to mmap .*: Cannot allocate memory": f"{_CODE}/aten/src/ATen/MapAllocator.cpp",
    },
    Tier.PROBABLE: {
        # cuDNN 9 appends a detail to these names, as in CUDNN_STATUS_INTERNAL_ERROR_HOST_...
        "CUDNN_STATUS_(NOT_SUPPORTED|ALLOC_FAILED|INTERNAL_ERROR|EXECUTION_FAILED)": (
            "pytorch/pytorch/issues/81620"
        ),
        # A handle is made with the first convolution, when tensors may have filled the device.
        "CUDNN_STATUS_NOT_INITIALIZED": "haotian-liu/LLaVA/issues/392",
        "(CU|HIP)BLAS_STATUS_ALLOC_FAILED": "QwenLM/Qwen3/issues/873",
        "(CU|HIP)BLAS_STATUS_NOT_INITIALIZED": "EleutherAI/lm-evaluation-harness/issues/1689",
        # Of a workspace that is not available; a kernel of cuBLAS that fails otherwise breaks the
        # context, which the next look at the device shows.
        "(CU|HIP)BLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)": "deepspeedai/DeepSpeed/issues/294",
        # NCCL names only the last of its own messages.
        "Failed to CUDA (m|c)alloc": "sgl-project/sglang/issues/1116",
        "CUSOLVER_STATUS_INTERNAL_ERROR": "JuliaGPU/CUDA.jl/issues/1924",
        "CUFFT_INTERNAL_ERROR": "pytorch/pytorch/issues/119420",
        "CUFFT_ALLOC_FAILED": "pytorch/pytorch/issues/6511",
        "(GET|FIND) was unable to find an engine": "pytorch/pytorch/issues/108645",
        "Unable to find a valid cuDNN algorithm to run convolution": "marqo-ai/marqo/issues/101",
        "Invalid buffer size": "pytorch/pytorch/issues/141909",
        "can NOT allocate memory block with size larger than 4GB": (
            "intel/intel-extension-for-pytorch/issues/492"
        ),
        "INTERNAL ASSERT FAILED.*CUDACachingAllocator": "pytorch/pytorch/issues/185240",
        # A CUDA graph being captured when the allocator makes room by freeing its cache.
        "operation failed due to a previous error during capture": "pytorch/pytorch/pull/187795",
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED": "pytorch/pytorch/issues/112377",
        # An operator built for PyTorch's stable ABI, as of torchvision, may lose the reason.
        r" API call failed at .+, line \d+$": f"{_CODE}/torch/headeronly/util/shim_utils.h",
        # "… primitive descriptor" is another failure: oneDNN has no such operation.
        "could not (create|execute) a primitive(?! descriptor)": "pytorch/pytorch/issues/55884",
        # A thread's stack is memory too: seen under RLIMIT_DATA.
        "can't start new thread": "python/cpython/blob/main/Modules/_threadmodule.c",
        # The same of std::thread, as in TCPStore; an OSError has "[Errno 11] " before it.
        r"(?<!\] )Resource temporarily unavailable": "en.cppreference.com/w/cpp/thread/thread",
    },
    # Tensors of more than 2**31 elements, and grids of more than 65535 blocks.
    Tier.TOO_LARGE: {
        "canUse32BitIndexMath": "pytorch/pytorch/issues/80020",
        "(less|more) than INT_MAX elements": "pytorch/pytorch/issues/144855",
        r"numel\(\) <= std::numeric_limits<int32_t>::max\(\)": "pytorch/pytorch/issues/131185",
        "[Ii]nteger out of range": "pytorch/pytorch/issues/113833",
        "CUDA error: invalid configuration argument": "pytorch/pytorch/issues/142228",
    },
    Tier.POISONED: {
        "illegal memory access": _CUDA_ERRORS,
        # Not just "device-side assert": every CUDA error of PyTorch ends with the advice to "enable
        # device-side assertions", an OOM too.
        "device-side assert triggered": _CUDA_ERRORS,
        "misaligned address": _CUDA_ERRORS,
        "unspecified launch failure": _CUDA_ERRORS,
        "an illegal instruction was encountered": _CUDA_ERRORS,
        "the launch timed out and was terminated": _CUDA_ERRORS,
        # Invalid addresses of code and stack end in these.
        "CUDA error: (invalid program counter|hardware stack error|operation not supported on "
        "global/shared address space)": _CUDA_ERRORS,
        "UR_RESULT_ERROR_OUT_OF_RESOURCES": "intel/torch-xpu-ops/issues/1324",
        "UR_RESULT_ERROR_DEVICE_LOST": "intel/torch-xpu-ops/issues/3155",
    },
}

# Failures that are recognized by other exceptions, or that only a dying process prints.
_OTHERS = (
    # torch.OutOfMemoryError is the same class, but PyTorch 2.4 has only this name.
    Row(Tier.CERTAIN, "", f"{_PYTORCH}/pull/121702", (torch.cuda.OutOfMemoryError,)),
    Row(Tier.CERTAIN, "", f"{_PYTHON_EXCEPTIONS}#MemoryError", (MemoryError,)),
    Row(Tier.CERTAIN, r"^[\w.]*MemoryError\b", f"{_PYTHON_EXCEPTIONS}#MemoryError", ()),
    # ENOMEM: the number is the same on Linux, macOS and Windows, the words are not.
    Row(Tier.CERTAIN, r"\[Errno 12\]", f"{_PYTHON_EXCEPTIONS}#OSError", (OSError,)),
    Row(
        Tier.CERTAIN,
        r"\bout of memory \(2\)",
        f"{_GITHUB}{_CODE}/torch/cuda/__init__.py",
        (torch.cuda.CudaError,),
    ),
    # bitsandbytes prints it and calls exit(1).
    Row(
        Tier.CERTAIN,
        r"^Error out of memory at line \d+ in file",
        f"{_GITHUB}bitsandbytes-foundation/bitsandbytes/issues/464",
        (),
    ),
    Row(
        Tier.PROBABLE,
        "libgomp: Thread creation failed",
        f"{_GITHUB}gcc-mirror/gcc/blob/master/libgomp/team.c",
        (),
    ),
    Row(
        Tier.POISONED,
        "Memory access fault by GPU",
        f"{_GITHUB}ROCm/legacy-rocm-build/issues/1262",
        (),
    ),
)

TABLE: tuple[Row, ...] = (
    *_OTHERS,
    *(
        Row(tier, text, source if "://" in source else _GITHUB + source)
        for tier, texts in _TEXTS.items()
        for text, source in texts.items()
    ),
)
