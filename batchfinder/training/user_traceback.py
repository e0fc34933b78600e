"""Format errors of the user's own code, without the frames of batchfinder."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

# Modules between the entry point and the user's code. Tenacity passes exceptions on in a future
# of concurrent.
_OUR_MODULES = frozenset({"batchfinder", "click", "concurrent", "importlib", "runpy", "tenacity"})
# A module's call adds two or three frames of PyTorch before its forward. They explain no error.
_CALLS_OF_MODULES = frozenset({"_wrapped_call_impl", "_call_impl", "inner"})

# "Expected all tensors to be on the same device, but ..." (most operators), and "Input type
# (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same" (convolutions).
_TWO_DEVICES = re.compile(r"to be on the same device|type \(torch\.[a-z]+\.\w*Tensor\)")
_ONE_DEVICE = (
    "The model and the batch are moved to the search's device. Try device=inputs.device for "
    "the tensors that the code makes, and register_buffer for those that the model keeps"
)
# DistributedDataParallel's for unused parameters, and for a layer that reentrant checkpointing uses
# twice. They name options, which --strategy ddp cannot give; it keeps a model that is wrapped.
_UNLIKE_DDP = re.compile(r"Expected to (have finished reduction|mark a variable ready only once)")
_WRAP_IT = (
    "Try a target that wraps the model as your training does: "
    "DistributedDataParallel(model, find_unused_parameters=True), or static_graph=True"
)
# torch.stack in default_collate, which makes the batches of a data set without a collate function.
_UNEQUAL = re.compile("stack expects each tensor to be equal size")
_COLLATE = "Try your DataLoader, whose collate_fn pads them, in place of the data set"


def user_traceback(error: BaseException) -> str:
    """Format an exception as Python prints it, from the user's first frame on.

    The text looks as if the user had run the code directly. It leaves out batchfinder's frames, the
    frames between it and the user's code, frames in which a module calls its ``forward``, and
    frames that simulate an operation of PyTorch. A traceback that never passed through batchfinder
    has all its other frames.

    Example:
        >>> try:
        ...     1 / 0
        ... except ZeroDivisionError as error:
        ...     print(user_traceback(error).splitlines()[-1])
        ZeroDivisionError: division by zero
    """
    first = _first_user_frame(error.__traceback__)
    if first is None and error.__traceback__ is not None:
        # A file that cannot be compiled has no frame. For it, Python shows only the error.
        return "".join(traceback.format_exception_only(type(error), error))
    shown = traceback.TracebackException(type(error), error, first)
    del shown.stack[_frames_to_our_simulation(first) :]
    shown.stack[:] = [
        frame
        for frame in shown.stack
        if frame.name not in _CALLS_OF_MODULES
        or not frame.filename.endswith("torch/nn/modules/module.py")
    ]
    return "".join(shown.format())


@contextmanager
def raised_while(doing: str) -> Iterator[None]:
    """Mark an error of the user's code with what it was called for; see :func:`error_line`."""
    try:
        yield
    except Exception as error:
        mark(error, doing)
        raise


def mark(error: BaseException, doing: str) -> None:
    """Mark an error with what was done meanwhile, unless a call inside of it did so."""
    vars(error).setdefault("batchfinder_doing", doing)


def error_line(error: BaseException) -> str:
    """Return the kind of an error, the first line of its text, and what was done meanwhile.

    A hint is added where one is known.

    Example:
        >>> try:
        ...     with raised_while("the loader made a batch"):
        ...         1 / 0
        ... except ZeroDivisionError as error:
        ...     print(error_line(error))
        ZeroDivisionError: division by zero (raised while the loader made a batch)
    """
    line = "".join(f"{type(error).__name__}: {error}".splitlines()[:1]).removesuffix(": ")
    doing = _doing(error)
    hint = _hint_for(line, doing)
    if found := _UNLIKE_DDP.search(line):  # the rest of the line is a paragraph
        line = line[: found.end()]
    elif hint:
        line = line.rstrip(".!")
    return f"{line}{doing and f' ({doing})'}{hint and f'. {hint}'}"


def add_hint(error: Exception) -> None:
    """Let Python show below an error what :func:`error_line` adds to it (Python 3.11)."""
    doing = _doing(error)
    hint = ". ".join(filter(None, (doing, _hint_for(str(error), doing))))
    if hint and sys.version_info >= (3, 11):
        error.add_note(f"batchfinder: {hint}")


def _doing(error: BaseException) -> str:
    doing = vars(error).get("batchfinder_doing")
    return f"raised while {doing}" if doing else ""


def _hint_for(text: str, doing: str) -> str:
    hints = {_TWO_DEVICES: _ONE_DEVICE, _UNLIKE_DDP: _WRAP_IT}
    if doing.endswith(" made a batch"):
        hints[_UNEQUAL] = _COLLATE
    return next((hint for pattern, hint in hints.items() if pattern.search(text)), "")


def _first_user_frame(frame: TracebackType | None) -> TracebackType | None:
    start = frame
    # The first frames belong to the entry script and click, or to a test that called batchfinder.
    while frame is not None and _top_module(frame) != "batchfinder":
        frame = frame.tb_next
    if frame is None:
        return start
    while frame is not None and _top_module(frame) in _OUR_MODULES:
        frame = frame.tb_next
    return frame


def _frames_to_our_simulation(frame: TracebackType | None) -> int:
    """Return the number of frames before PyTorch calls batchfinder's simulation of an operation.

    It is the number of all frames if the traceback does not end in a simulation.
    """
    modules = []
    while frame is not None:
        modules.append(_top_module(frame))
        frame = frame.tb_next
    count = len(modules)
    for index, module in reversed([*enumerate(modules)]):
        if module == "batchfinder":
            count = index
        elif module != "torch":
            break
    return count


def _top_module(frame: TracebackType) -> str:
    names = frame.tb_frame.f_globals
    name = names.get("__name__", "")
    if name == "__main__":  # python -m batchfinder
        name = names.get("__package__") or ""
    return str(name).partition(".")[0]
