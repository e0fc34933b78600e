"""Why a training step cannot be simulated, and where in the user's code that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from batchfinder.errors import BatchTooSmallError, StepError
from batchfinder.simulation.kernels.attention import NO_KERNEL
from batchfinder.simulation.tracing.callers import is_user_code

_UNFAKEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
# A build without CUDA, a machine without a driver, and one without a GPU.
_NO_CUDA = (
    "not compiled with CUDA",
    "no NVIDIA driver",
    "No CUDA GPUs",
    "CUDA-capable",
    "with support for cuda",
    "NVTX functions not installed",
)
# By what PyTorch says; https://github.com/pytorch/pytorch/tree/main/torch/_subclasses
_REASONS = {
    "no fake impl": "a custom operator says nothing of its output's shape (register_fake)",
    ".numpy() is not supported": "the values of a tensor go to NumPy",
    "Cannot access data pointer": "a custom or Triton kernel reads the memory of a tensor",
    "its data is not allocated yet": "values of tensors go into a new one (torch.tensor([...]))",
    "SparseTensor": "a sparse tensor appears",
    "shape_env must not be None": "a nested tensor appears",
    "_apply(): Couldn't swap": "a module is converted in the step (.to() or .half() of it)",
    "NYI: aten": "an operator has no simulation (pin_memory, say)",
}
USE_FIND = "this step cannot be simulated; `batchfinder find` runs it on the device itself"


@contextmanager
def explained(names: dict[int, str]) -> Iterator[None]:
    """Say where and why a step cannot run on tensors without data.

    Args:
        names: of the modules that will run, by their id.
    """
    try:
        yield
    except _UNFAKEABLE as error:
        if _is_users(error):
            raise
        raise StepError(f"{_reason(error)}{place(error, names)}: {USE_FIND}") from error
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise BatchTooSmallError(str(error)) from error
        raise
    except (RuntimeError, AssertionError) as error:
        reason = next((why for text, why in _REASONS.items() if text in str(error)), "")
        if reason:
            raise StepError(f"{reason}{place(error, names)}: {USE_FIND}") from error
        if NO_KERNEL in str(error):
            raise StepError(
                f"{error}{place(error, names)}: those that could run there are switched off, by "
                "sdpa_kernel() or torch.backends.cuda.enable_..._sdp(); allow one more"
            ) from error
        refusal = without_cuda(error, names)
        if refusal is None:
            raise
        raise refusal from error


def without_cuda(error: BaseException, names: Mapping[int, str] | None = None) -> StepError | None:
    """What to tell the user where PyTorch says that it finds no CUDA; None for other errors.

    Args:
        error: what was raised.
        names: of modules, by their id.
    """
    if not any(text in str(error) for text in _NO_CUDA):
        return None
    return StepError(
        f"CUDA is asked for{place(error, names or {})}, and here is none: build and run on the CPU "
        "(the estimate moves nothing; take a device from a tensor, as x.device), or run "
        "`batchfinder find` where the GPU is"
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, DataDependentOutputException):
        return "a value of a tensor is read (.item(), bool(), a comparison in an if)"
    if isinstance(error, DynamicOutputShapeException):
        return "the shape of a result depends on the data (nonzero, unique, a boolean mask)"
    if "SparseTensor" in str(error):
        return _REASONS["SparseTensor"]
    operator = getattr(error, "func", None)
    if operator is None:
        return str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    return f"{operator} says nothing of its output's shape"


def _is_users(error: BaseException) -> bool:
    """Whether the user's code says itself that something is not there, as any device would hear."""
    *_, last = _frames(error.__traceback__)
    name = last.f_code.co_filename
    return isinstance(error, NotImplementedError) and (
        is_user_code(name)
        or last.f_code.co_name == "_forward_unimplemented"
        or name == torch.autograd.function.__file__  # no backward()
        or not str(error)  # as of a method that a class is to have
    )


def place(error: BaseException, names: Mapping[int, str]) -> str:
    """Where in the user's code an error was raised, as " in NAME at FILE:LINE".

    Args:
        error: what was raised.
        names: of modules, by their id.
    """
    module = line = ""
    for frame in _frames(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = names.get(id(owner)) or module or type(owner).__name__
        if is_user_code(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{_line_of(error, frame)}"
    parts = [part for part in (module and f"in {module}", line and f"at {line}") if part]
    return f" {' '.join(parts)}" if parts else ""


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _line_of(error: BaseException, frame: FrameType) -> int:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame is not frame:
        traceback = traceback.tb_next
    return traceback.tb_lineno if traceback is not None else frame.f_lineno
