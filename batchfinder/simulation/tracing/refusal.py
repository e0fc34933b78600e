"""Explain why a training step cannot be simulated, and where in the user's code."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from batchfinder.errors import BatchTooSmallError, StepError
from batchfinder.probing.too_small import needs_more_than_one_sample
from batchfinder.simulation.kernels.attention import NO_KERNEL
from batchfinder.simulation.tracing.callers import is_outside_pytorch
from batchfinder.simulation.values.unknown import ValueUnknownError
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.state.reach import modules_reached

_UNFAKEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
# Messages of a build without CUDA, a machine without a driver, and one without a GPU.
_NO_CUDA = (
    "not compiled with CUDA",
    "no NVIDIA driver",
    "No CUDA GPUs",
    "CUDA-capable",
    "with support for cuda",
    "NVTX functions not installed",
)
# Reasons by PyTorch's message; https://github.com/pytorch/pytorch/tree/main/torch/_subclasses
_REASONS = {
    "no fake impl": "a custom operator does not declare its output's shape (register_fake)",
    ".numpy() is not supported": "the values of a tensor are passed to NumPy",
    "Cannot access data pointer": "a custom or Triton kernel reads the memory of a tensor",
    "its data is not allocated yet": "a tensor is made from values of others (torch.tensor)",
    "SparseTensor": "the step uses a sparse tensor",
    "shape_env must not be None": "the step uses a nested tensor",
    "_apply(): Couldn't swap": "the step converts a module with .to() or .half()",
    "NYI: aten": "an operator, such as pin_memory, cannot run without data",
}
USE_FIND = "the step cannot be simulated. Try batchfinder find, which runs it on the device"


@contextmanager
def explained(names: dict[int, str]) -> Iterator[None]:
    """Turn errors of a step without data into a ``StepError`` that says why and where."""
    try:
        yield
    except _UNFAKEABLE as error:
        if _is_users(error):
            raise
        raise StepError(f"{_reason(error)}{place(error, names)}: {USE_FIND}") from error
    except ValueUnknownError as error:
        raise StepError(f"{error}{place(error, names)}: {USE_FIND}") from error
    except ValueError as error:
        if needs_more_than_one_sample(error):
            raise BatchTooSmallError(str(error)) from error
        raise
    except (RuntimeError, AssertionError) as error:
        reason = next((why for text, why in _REASONS.items() if text in str(error)), "")
        if reason:
            raise StepError(f"{reason}{place(error, names)}: {USE_FIND}") from error
        if NO_KERNEL in str(error):
            raise StepError(
                f"{error}{place(error, names)}: the possible ones are disabled. Try allowing one "
                "more in sdpa_kernel() or torch.backends.cuda.enable_..._sdp()."
            ) from error
        refusal = without_cuda(error, names)
        if refusal is None:
            raise
        raise refusal from error


def without_cuda(error: BaseException, names: Mapping[int, str] | None = None) -> StepError | None:
    """Return the error to raise if PyTorch finds no CUDA; None for other errors."""
    if not any(text in str(error) for text in _NO_CUDA):
        return None
    return StepError(
        f"the code requests CUDA{place(error, names or {})}, but this machine has none. Try the "
        "CPU: an estimate moves nothing, so take devices from tensors (x.device). Or run "
        "batchfinder find on the machine with the GPU."
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, DataDependentOutputException):
        return "the step reads a value of a tensor (.item(), bool(), a comparison in an if)"
    if isinstance(error, DynamicOutputShapeException):
        if "lstsq" in str(error.func):
            return (
                "the residuals of torch.linalg.lstsq depend on the rank of its matrix, which is "
                "unknown without data (torch.linalg.solve(A.mT @ A, A.mT @ B) can be simulated)"
            )
        return "the shape of a result depends on the data (nonzero, unique, a boolean mask)"
    if "SparseTensor" in str(error):
        return _REASONS["SparseTensor"]
    operator = getattr(error, "func", None)
    if operator is None:
        return str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    return f"{operator} does not declare its output's shape (register_fake)"


def _is_users(error: BaseException) -> bool:
    """Return True if the user's code itself raised the error, as it would on any device."""
    *_, (last, _line) = traceback.walk_tb(error.__traceback__)
    name = last.f_code.co_filename
    return isinstance(error, NotImplementedError) and (
        is_outside_pytorch(name)
        or last.f_code.co_name == "_forward_unimplemented"
        or name == torch.autograd.function.__file__  # no backward()
        or not str(error)  # an abstract method
    )


def place(error: BaseException, names: Mapping[int, str]) -> str:
    """Return where in the user's code an error was raised, as " in NAME at FILE:LINE".

    ``names`` has the names of modules, by module id.
    """
    module = line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = names.get(id(owner)) or module or type(owner).__name__
        if is_outside_pytorch(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{number}"
    parts = [part for part in (module and f"in {module}", line and f"at {line}") if part]
    return f" {' '.join(parts)}" if parts else ""


def names_of(setup: TrainingSetup) -> dict[int, str]:
    """Return the names of all modules that may run, by module id."""
    beside = modules_reached(setup.functions)
    return {
        id(module): name
        for outer, prefix in {**beside, setup.model: ""}.items()
        for name, module in outer.named_modules(prefix=prefix)
    }
