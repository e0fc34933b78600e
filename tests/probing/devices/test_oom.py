"""Every row of the table: a real message that it means, and one close by that it does not."""

from __future__ import annotations

import errno
import os
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.probing.devices.oom import (
    Failure,
    classify,
    classify_text,
)
from batchfinder.probing.devices.oom_table import TABLE, Row, Tier

# What PyTorch adds to every CUDA error, whatever it is.
CUDA_ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1.\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


def cuda_error(text: str) -> torch.cuda.CudaError:
    """Its own constructor asks the CUDA runtime for the text, which a CPU build does not have."""
    return torch.cuda.CudaError.__new__(torch.cuda.CudaError, text)


# For each row, in its order: an error as it is really raised, or the text as it is really printed
# where no exception carries it; then one that only looks like it.
CASES: tuple[tuple[BaseException | str, BaseException | str], ...] = (
    (
        torch.cuda.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
        RuntimeError("Allocation on device 0 is not supported."),
    ),
    (MemoryError(), BufferError()),
    (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 2.00 GiB for an array",
        "ValueError: no handler for MemoryError was given",
    ),
    (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), OSError(errno.ENOSPC, "No space left")),
    (cuda_error("out of memory (2)"), cuda_error("invalid argument (1)")),
    (
        "\nError out of memory at line 380 in file /src/csrc/pythonInterface.c\n",
        "Error invalid argument at line 380 in file /src/csrc/pythonInterface.c",
    ),
    (
        "\nlibgomp: Thread creation failed: Resource temporarily unavailable",
        "libgomp: Invalid value for environment variable OMP_NUM_THREADS",
    ),
    (
        "Memory access fault by GPU node-1 (Agent handle: 0x5de975b3cc80) on address 0x799bfc0630",
        "Memory access by CPU only",
    ),
    (
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 4.00 GiB total)"),
        ValueError("catch CUDA out of memory yourself, this trainer does not"),
    ),
    (
        RuntimeError(f"CUDA error: out of memory{CUDA_ADVICE}"),
        RuntimeError(f"CUDA error: invalid device function{CUDA_ADVICE}"),
    ),
    (
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA driver error: invalid argument"),
    ),
    (
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
    ),
    (
        torch.distributed.DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:2006, unhandled cuda error\nLast error:\n"
            "Cuda failure 2 'out of memory'"
        ),
        torch.distributed.DistBackendError("Last error:\nCuda failure 1 'invalid argument'"),
    ),
    (
        RuntimeError("HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity"),
        RuntimeError("HIP error: invalid device function"),
    ),
    (
        RuntimeError("XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity"),
        RuntimeError("XPU is not available"),
    ),
    (
        RuntimeError(
            "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"
        ),
        RuntimeError("level_zero backend failed with error: 45 (UR_RESULT_ERROR_INVALID_ARGUMENT)"),
    ),
    (
        RuntimeError("Allocation is out of device memory on current platform."),
        RuntimeError("FP64 data type is unsupported on current platform."),
    ),
    (
        RuntimeError("NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total)"),
        RuntimeError("NPU function error: aclrtSetDevice"),
    ),
    (
        RuntimeError("MPS backend out of memory (MPS allocated: 5.56 GB, max allowed: 6.80 GB)."),
        RuntimeError("Placeholder storage has not been allocated on MPS device!"),
    ),
    (
        RuntimeError(
            "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::3288334336"
        ),
        RuntimeError("[Rank:0] FATAL ERROR :: MODULE:PT_BRIDGE Exception in Lowering thread"),
    ),
    (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 4000000000000000 bytes. Error code 12 (Cannot allocate "
            "memory)"
        ),
        RuntimeError("[enforce fail at alloc_cpu.cpp:80] nbytes >= 0. alloc_cpu() seems negative"),
    ),
    (
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you"
        ),
        RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0"),
    ),
    (RuntimeError("std::bad_alloc"), RuntimeError("std::bad_cast")),
    (
        RuntimeError(
            "unable to mmap 4096 bytes from file </torch_9_1_0>: Cannot allocate memory (12)"
        ),
        RuntimeError("unable to mmap 4096 bytes from file </torch_9_1_0>: Invalid argument (22)"),
    ),
    (
        RuntimeError(
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
            "non-contiguous input."
        ),
        RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"),
    ),
    (
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_VERSION_MISMATCH"),
    ),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(handle)`"),
    ),
    (
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
        ),
        RuntimeError("Default process group has not been initialized"),
    ),
    (
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"
        ),
        RuntimeError("CUDA error: CUBLAS_STATUS_ARCH_MISMATCH when calling `cublasSgemm(handle)`"),
    ),
    (
        torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:76, unhandled cuda error\nLast error:\n"
            "Failed to CUDA calloc async 67108864 bytes"
        ),
        torch.distributed.DistBackendError("Last error:\nFailed to find CUDA device 3"),
    ),
    (
        RuntimeError(
            "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate`"
        ),
        RuntimeError(
            "cusolver error: CUSOLVER_STATUS_INVALID_VALUE, when calling `cusolverDnXgeqrf`"
        ),
    ),
    (
        RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
        RuntimeError("cuFFT error: CUFFT_INVALID_SIZE"),
    ),
    (
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("cuFFT error: CUFFT_INVALID_PLAN"),
    ),
    (
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("unable to find an engine of that name in the registry"),
    ),
    (
        RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
        RuntimeError("Unable to find a valid checkpoint to run from"),
    ),
    (RuntimeError("Invalid buffer size: 19.45 GB"), RuntimeError("Invalid kernel size: 3")),
    (
        RuntimeError(
            "Current platform can NOT allocate memory block with size larger than 4GB! Tried to "
            "allocate 7.62 GiB"
        ),
        RuntimeError("Current platform can NOT run FP64"),
    ),
    (
        RuntimeError(
            'block INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":995, please '
            "report a bug to PyTorch."
        ),
        RuntimeError('false INTERNAL ASSERT FAILED at "../aten/src/ATen/Context.cpp":12, please'),
    ),
    (
        RuntimeError("CUDA error: operation failed due to a previous error during capture"),
        RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    ),
    (
        RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED, please report a bug to PyTorch."),
        RuntimeError("NVML was not found"),
    ),
    (
        RuntimeError(
            'torch_call_dispatcher( "aten::masked_select", "", stack.data(), TORCH_ABI_VERSION) '
            "API call failed at /vision/torchvision/csrc/ops/cuda/../StableABICompat.h, line 77"
        ),
        RuntimeError(
            'mask must be boolean (originally from torch_call_dispatcher( "aten::masked_select", '
            '"", stack.data(), TORCH_ABI_VERSION) API call failed at /torch/stable/ops.h, line 997)'
        ),
    ),
    (
        RuntimeError("could not create a primitive"),
        RuntimeError("could not create a primitive descriptor for a matmul primitive"),
    ),
    (
        RuntimeError("can't start new thread"),
        RuntimeError("cannot join thread before it is started"),
    ),
    (
        RuntimeError("Resource temporarily unavailable"),
        BlockingIOError("[Errno 11] Resource temporarily unavailable"),
    ),
    (
        RuntimeError(
            "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true"
        ),
        RuntimeError("Expected input.is_contiguous() to be true, but got false."),
    ),
    (
        RuntimeError(
            "upsample_nearest_nhwc only supports output tensors with less than INT_MAX elements"
        ),
        RuntimeError("a list of more than 4 elements was given"),
    ),
    (
        RuntimeError(
            "Expected grad_output.numel() <= std::numeric_limits<int32_t>::max() to be true, but "
            "got false."
        ),
        RuntimeError("Expected weight.numel() == bias.numel() to be true, but got false."),
    ),
    (
        RuntimeError("integer out of range"),
        IndexError("index out of range in self"),
    ),
    (
        RuntimeError(f"CUDA error: invalid configuration argument{CUDA_ADVICE}"),
        RuntimeError(f"CUDA error: invalid argument{CUDA_ADVICE}"),
    ),
    (
        RuntimeError(f"CUDA error: an illegal memory access was encountered{CUDA_ADVICE}"),
        ValueError("an illegal memory access was encountered"),
    ),
    (
        RuntimeError(f"CUDA error: device-side assert triggered{CUDA_ADVICE}"),
        RuntimeError(f"CUDA error: invalid device ordinal{CUDA_ADVICE}"),
    ),
    (
        RuntimeError(f"CUDA error: misaligned address{CUDA_ADVICE}"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"),
    ),
    (
        RuntimeError(f"CUDA error: unspecified launch failure{CUDA_ADVICE}"),
        RuntimeError(f"CUDA error: too many resources requested for launch{CUDA_ADVICE}"),
    ),
    (
        RuntimeError(f"CUDA error: an illegal instruction was encountered{CUDA_ADVICE}"),
        RuntimeError("an illegal value was encountered in argument 4"),
    ),
    (
        RuntimeError(f"CUDA error: the launch timed out and was terminated{CUDA_ADVICE}"),
        RuntimeError("the store timed out after 300000ms"),
    ),
    (
        RuntimeError(f"CUDA error: invalid program counter{CUDA_ADVICE}"),
        RuntimeError(f"CUDA error: operation not supported{CUDA_ADVICE}"),
    ),
    (
        RuntimeError("UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
        RuntimeError("UR backend failed. UR backend returns:4 (UR_RESULT_ERROR_INVALID_VALUE)"),
    ),
    (
        RuntimeError("Native API failed. Native API returns: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
        RuntimeError("Native API failed. Native API returns: -999 (Unknown PI error)"),
    ),
)


def classified(error: BaseException | str) -> Failure | None:
    return classify_text(error) if isinstance(error, str) else classify(error)


@pytest.mark.parametrize(
    ("row", "real", "near_miss"),
    [(row, *case) for row, case in zip(TABLE, CASES, strict=True)],
    ids=[row.pattern or row.types[0].__name__ for row in TABLE],
)
def test_every_row_knows_its_error_and_no_other(
    row: Row, real: BaseException | str, near_miss: BaseException | str
) -> None:
    # By this row, and not by another that happens to match as well.
    assert re.search(row.pattern, str(real), re.MULTILINE)
    assert isinstance(real, row.types or str)
    assert row.source.startswith("https://")
    failure = classified(real)
    assert failure is not None
    assert failure.tier is row.tier
    assert "\n" not in failure.reason
    assert 0 < len(failure.reason) <= 160
    assert classified(near_miss) is None


@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("Cuda failure 'out of memory'", Tier.CERTAIN),
        ("HIP error: out of memory", Tier.CERTAIN),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", Tier.PROBABLE),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", Tier.PROBABLE),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", Tier.PROBABLE),
        ("HIPBLAS_STATUS_ALLOC_FAILED", Tier.PROBABLE),
        ("CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`", Tier.PROBABLE),
        ("FIND was unable to find an engine to execute this computation", Tier.PROBABLE),
        ("could not execute a primitive", Tier.PROBABLE),
        (
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":830',
            Tier.PROBABLE,
        ),
        ("Triton Error [CUDA]: misaligned address", Tier.POISONED),
    ],
)
def test_other_spellings(text: str, tier: Tier) -> None:
    failure = classify(RuntimeError(text))
    assert failure is not None
    assert failure.tier is tier


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (32x784 and 512x10)"),
        RuntimeError("Expected all tensors to be on the same device"),
        RuntimeError(""),
        ValueError("out of memory"),
        AssertionError("CUDA out of memory"),
        Exception("DefaultCPUAllocator: can't allocate memory"),
        KeyError("std::bad_alloc"),
        NotImplementedError("no kernel to handle memory_efficient_attention"),
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        RuntimeError("cannot create std::vector larger than max_size()"),
    ],
)
def test_other_errors_are_the_user_s_own(error: Exception) -> None:
    assert classify(error) is None


def test_what_pytorch_numpy_and_python_really_raise_here() -> None:
    for allocate in (
        lambda: torch.empty(10**15),
        lambda: np.empty(10**15),
        lambda: bytearray(10**15),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        failure = classify(caught.value)
        assert failure is not None
        assert failure.tier is Tier.CERTAIN


def test_the_reason_is_the_line_that_says_it() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert classify(caught.value) == Failure(
        Tier.CERTAIN,
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000000 bytes. "
        "Error code 12 (Cannot allocate memory)",
    )
    assert classify(RuntimeError(f"CUDA error: misaligned address{CUDA_ADVICE}")) == Failure(
        Tier.POISONED, "CUDA error: misaligned address"
    )
    assert classify(MemoryError()) == Failure(Tier.CERTAIN, "MemoryError")


def raised_from(cause: Exception) -> Exception:
    try:
        raise ValueError("the trainer gave up") from cause
    except ValueError as error:
        return error


def raised_during(context: Exception, *, hidden: bool) -> Exception:
    try:
        try:
            raise context
        except type(context):
            if hidden:
                raise ValueError("the trainer gave up") from None
            raise ValueError("the trainer gave up")  # noqa: B904 - that is the case here
    except ValueError as error:
        return error


def test_an_oom_that_was_wrapped_is_an_oom() -> None:
    oom = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    expected = Failure(Tier.CERTAIN, "CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert classify(raised_from(oom)) == expected
    assert classify(raised_from(raised_from(oom))) == expected
    assert classify(raised_during(oom, hidden=False)) == expected
    # "from None" hides it from the reader of a traceback; the memory did run out.
    assert classify(raised_during(oom, hidden=True)) == expected


def test_a_chain_in_a_circle_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    assert classify(first) is None
    second.__cause__ = MemoryError("the end")
    assert classify(first) == Failure(Tier.CERTAIN, "the end")


def test_ctrl_c_while_handling_an_oom_is_ctrl_c() -> None:
    interrupt = KeyboardInterrupt()
    interrupt.__context__ = torch.cuda.OutOfMemoryError("CUDA out of memory.")
    assert classify(interrupt) is None
    assert classify(KeyboardInterrupt("CUDA out of memory.")) is None


ONE_OF_EACH = {
    Tier.PROBABLE: RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
    Tier.CERTAIN: RuntimeError("CUDA out of memory."),
    Tier.TOO_LARGE: RuntimeError("integer out of range"),
    Tier.POISONED: RuntimeError("CUDA error: unspecified launch failure"),
}


@given(st.lists(st.sampled_from([None, *Tier]), max_size=5))
def test_the_highest_tier_in_a_chain_wins(tiers: list[Tier | None]) -> None:
    chain: list[BaseException] = [
        ValueError("plain") if tier is None else RuntimeError(*ONE_OF_EACH[tier].args)
        for tier in tiers
    ]
    outer: BaseException = ValueError("outermost")
    for inner in chain:
        inner.__context__ = outer
        outer = inner
    ranked = [tier for tier in Tier if tier in tiers]
    failure = classify(outer)
    assert (failure.tier if failure else None) is (ranked[-1] if ranked else None)


@given(st.text(max_size=300))
def test_any_text_means_on_stderr_what_it_means_in_an_error(text: str) -> None:
    failure = classify(RuntimeError(text))
    on_stderr = classify_text(text)
    assert failure is None or failure.tier is Tier.PROBABLE or failure == on_stderr
    assert classify(ValueError(text)) is None


def test_the_last_words_of_a_process() -> None:
    assert classify_text(
        "terminate called after throwing an instance of 'std::bad_alloc'\n"
        "  what():  std::bad_alloc\n"
    ) == Failure(Tier.CERTAIN, "terminate called after throwing an instance of 'std::bad_alloc'")
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n'
        "    bytearray(10**15)\n"
        "MemoryError\n"
    )
    assert classify_text(traceback) == Failure(Tier.CERTAIN, "MemoryError")
    assert classify_text("torch.OutOfMemoryError: Allocation on device 0 failed") == Failure(
        Tier.CERTAIN, "torch.OutOfMemoryError: Allocation on device 0 failed"
    )
    assert classify_text("OSError: [Errno 12] Cannot allocate memory") is not None
    # A warning that PyTorch prints where cuDNN goes on with another plan.
    assert classify_text("UserWarning: Plan failed: CUDNN_STATUS_NOT_SUPPORTED") is None
    assert classify_text("libgomp: Thread creation failed") is not None
    assert classify_text("") is None
    assert classify_text("Segmentation fault (core dumped)") is None
