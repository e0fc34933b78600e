"""Whose code it was that called: the user's, PyTorch's or ours."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

import torch

_PYTORCH = (str(Path(torch.__file__).parent) + os.sep, "<")
_SIMULATION = str(Path(__file__).parents[1]) + os.sep
_BATCHFINDER = str(Path(__file__).parents[2]) + os.sep
_OPTIMIZERS = str(Path(torch.__file__).parent / "optim") + os.sep
# How many passes it makes in a step hangs on the values.
_LBFGS = _OPTIMIZERS + "lbfgs.py"
_CHECKING = "gaussian_nll_loss"  # that no variance is below 0
_GRAD_SCALERS = str(Path(torch.__file__).parent / "amp") + os.sep


def is_user_code(file_name: str) -> bool:
    """Whether a line of code is neither PyTorch's nor batchfinder's."""
    return not file_name.startswith((*_PYTORCH, _BATCHFINDER))


def user_line() -> str:
    """The innermost line of the user's code that led here, as ``file.py:12``; "" without one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_code(name):
            return f"{name}:{frame.f_lineno}"
        # Whatever called batchfinder is not the step.
        if name.startswith(_BATCHFINDER) and not name.startswith(_SIMULATION):
            return ""
        frame = frame.f_back
    return ""


def value_for_pytorch_itself() -> float | None:
    """The value of a tensor without data, where PyTorch's own code reads one.

    Optimizers read their step counter, as late in training, and the product of what they have
    decayed, which must not be 1; a GradScaler whether a gradient was not finite; a loss whether a
    variance is below 0.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_code(name):
            return None
        if name.startswith(_OPTIMIZERS):
            return None if name == _LBFGS else 1000.0
        if name.startswith(_GRAD_SCALERS) or frame.f_code.co_name == _CHECKING:
            return 0.0
        frame = frame.f_back
    return None
