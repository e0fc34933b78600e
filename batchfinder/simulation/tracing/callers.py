"""Tell from the call stack whether the user's code, PyTorch or batchfinder is calling."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path

import torch

_PYTORCH = (str(Path(torch.__file__).parent) + os.sep, "<")
_SIMULATION = str(Path(__file__).parents[1]) + os.sep
_BATCHFINDER = str(Path(__file__).parents[2]) + os.sep
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim") + os.sep
# The number of its passes per step depends on values.
_LBFGS = _OPTIMIZERS + "lbfgs.py"
_CHECKING = "gaussian_nll_loss"  # checks that no variance is negative
_GRAD_SCALERS = str(Path(torch.__file__).parent / "amp") + os.sep
# Checks that the parameters of a distribution, and values to score, are in its domain.
_DISTRIBUTION = str(Path(torch.__file__).parent / "distributions" / "distribution.py")


def is_outside_pytorch(file_name: str) -> bool:
    """Return True for a file of neither PyTorch nor batchfinder."""
    return not file_name.startswith((*_PYTORCH, _BATCHFINDER))


def _is_standard(file_name: str) -> bool:
    """Return True for a file of the standard library, such as a decorator's in contextlib.py."""
    return file_name.startswith(_STANDARD_LIBRARY) and "-packages" not in file_name


def user_line() -> str:
    """Return the innermost line of the user's code on the stack, as ``file.py:12``, or ""."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        name = frame.f_code.co_filename
        if is_outside_pytorch(name) and not _is_standard(name):
            return f"{name}:{line}"
        # Frames above batchfinder's own do not belong to the step.
        if name.startswith(_BATCHFINDER) and not name.startswith(_SIMULATION):
            return ""
    return ""


def value_for_pytorch_itself() -> float | None:
    """Return a value for a tensor without data that PyTorch's own code reads.

    Optimizers read their step counter, and a product of decay factors that must not be 1: they get
    a number from late in training. A GradScaler checks for gradients that are not finite, and a
    loss for negative variances: they get 0. A distribution checks that its arguments are valid: it
    gets 1. Return None for all other readers.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(2)):
        name = frame.f_code.co_filename
        if is_outside_pytorch(name):
            return None
        if name.startswith(_OPTIMIZERS):
            return None if name == _LBFGS else 1000.0
        if name.startswith(_GRAD_SCALERS) or frame.f_code.co_name == _CHECKING:
            return 0.0
        if name == _DISTRIBUTION:
            return 1.0
    return None
