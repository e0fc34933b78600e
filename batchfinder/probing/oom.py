"""Which errors mean out of memory: one table, every row with its source.

Types decide where they can (``torch.OutOfMemoryError``, ``MemoryError``). Texts count only in the
exceptions that PyTorch and the drivers raise, that is ``RuntimeError`` and its kinds: a
``ValueError`` of the user's own that talks about memory is a bug of theirs.
"""

from __future__ import annotations

import enum
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

_REASON_LENGTH = 160
_GITHUB = "https://github.com"
_PYTORCH = f"{_GITHUB}/pytorch/pytorch"
_PYTORCH_CODE = f"{_PYTORCH}/blob/main"
_PYTHON_EXCEPTIONS = "https://docs.python.org/3/library/exceptions.html"
# Lists the errors after which a process "must be terminated and relaunched" to go on with CUDA.
_CUDA_ERRORS = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"


class Tier(enum.Enum):
    """What a failure says about memory; the later ones outrank the earlier."""

    PROBABLE = "probable"
    """Often memory: free everything and repeat once before believing it."""
    CERTAIN = "certain"
    """Out of memory."""
    POISONED = "poisoned"
    """The device's context is broken: only a new process helps. It bounds the size, but no OOM."""


@dataclass(frozen=True)
class Failure:
    """A failure that bounds the batch size.

    Attributes:
        tier: what it says about memory.
        reason: one line for people, in the words of the error itself.
    """

    tier: Tier
    reason: str


@dataclass(frozen=True)
class Row:
    """One way in which such a failure shows itself.

    Attributes:
        tier: what it says about memory.
        pattern: regular expression, searched in the text; empty: the type alone decides.
        source: where the text comes from, or where it was seen for want of memory.
        types: the exceptions it counts in; none: only a dying process prints it.
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
    Row(Tier.POISONED, "illegal memory access", _CUDA_ERRORS),
    # Not just "device-side assert": every CUDA error of PyTorch ends with the advice to "enable
    # device-side assertions", an OOM too.
    Row(Tier.POISONED, "device-side assert triggered", _CUDA_ERRORS),
    Row(Tier.POISONED, "misaligned address", _CUDA_ERRORS),
    Row(Tier.POISONED, "unspecified launch failure", _CUDA_ERRORS),
    Row(Tier.POISONED, "an illegal instruction was encountered", _CUDA_ERRORS),
    Row(Tier.POISONED, "the launch timed out and was terminated", _CUDA_ERRORS),
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

_NEEDS_MORE_THAN_ONE = "Expected more than 1 value per channel when training"


def classify(error: BaseException) -> Failure | None:
    """Tell whether an exception, or one that it was raised from or during, bounds the batch size.

    The whole chain counts, ``raise … from None`` included: that hides a traceback from people, but
    memory did run out all the same. The highest tier in the chain wins. Call it on an exception
    that was raised outside any ``except`` block of our own, or its chain holds old failures.

    Args:
        error: what the training step raised.

    Returns:
        The failure; None if it is not one of memory: the user's own bug, or Ctrl-C.

    Example:
        >>> classify(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        Failure(tier=<Tier.CERTAIN: 'certain'>, reason='CUDA out of memory. Tried to allocate 2.00 GiB.')
        >>> classify(ValueError("the CUDA out of memory handler is missing")) is None
        True
    """  # noqa: E501 - a doctest's output cannot be broken
    if isinstance(error, KeyboardInterrupt):
        return None
    return _highest(
        Failure(row.tier, _reason(match) or type(link).__name__)
        for link in _chain(error)
        for row in TABLE
        if isinstance(link, row.types) and (match := _search(row, str(link)))
    )


def classify_text(text: str) -> Failure | None:
    """Tell the same from what a process wrote to stderr before it died.

    Weaker than :func:`classify`, as text has no types: for processes that leave nothing else.

    Args:
        text: the last lines, with a traceback or the C++ runtime's last words.

    Returns:
        The failure; None if no row of the table is found in the text.

    Example:
        >>> classify_text("terminate called after throwing an instance of 'std::bad_alloc'").tier
        <Tier.CERTAIN: 'certain'>
    """
    return _highest(
        Failure(row.tier, _reason(match))
        for row in TABLE
        if row.pattern and (match := _search(row, text))
    )


def needs_more_than_one_sample(error: BaseException) -> bool:
    """Whether a normalization layer asks for a larger batch: the smallest size is then 2.

    Source: ``torch.nn.functional.batch_norm``, which takes no statistics of a single value.

    Example:
        >>> import torch
        >>> try:
        ...     torch.nn.BatchNorm1d(3)(torch.ones(1, 3))
        ... except ValueError as error:
        ...     needs_more_than_one_sample(error)
        True
    """
    return any(
        isinstance(link, (ValueError, RuntimeError)) and _NEEDS_MORE_THAN_ONE in str(link)
        for link in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and all that it was raised from or during, each once."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        link = pending.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            pending += [link.__context__, link.__cause__]


def _search(row: Row, text: str) -> re.Match[str] | None:
    return re.search(row.pattern, text, re.MULTILINE)


def _highest(failures: Iterable[Failure]) -> Failure | None:
    ranks = list(Tier)
    return max(failures, key=lambda failure: ranks.index(failure.tier), default=None)


def _reason(match: re.Match[str]) -> str:
    """The line around the match, from the sentence it begins in: what comes before is noise."""
    text = match.string
    start = max(text.rfind("\n", 0, match.start()) + 1, text.rfind(". ", 0, match.start()) + 1)
    line = text[start:].strip().partition("\n")[0]
    return textwrap.shorten(line, _REASON_LENGTH, placeholder=" …")
