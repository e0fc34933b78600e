"""Text helpers shared by the table and the answer."""

from __future__ import annotations

import re

from batchfinder.training.user_module import is_language_model
from batchfinder.units import format_bytes, parse_bytes

# CUDA, HIP and XPU write "Tried to allocate 20.00 MiB", or "512 bytes" for small requests. MPS
# writes "MB" for MiB. The CPU allocator writes "you tried to allocate 4096 bytes". Sources in
# PyTorch: c10/cuda/CUDACachingAllocator.cpp, aten/src/ATen/mps/MPSAllocator.mm and
# c10/core/impl/alloc_cpu.cpp.
_REQUEST = re.compile(r"tried to allocate (\d+(?:\.\d+)?) ?(bytes|[KMGT]i?B)", re.IGNORECASE)


# What tensors of CUDA and HIP held then, and what the allocator held beyond them.
_HELD = re.compile(
    r"memory (\d\S* [KMGT]iB) is allocated by .*? and (\d\S* [KMGT]iB) is reserved by PyTorch but"
)


def allocator_request_bytes(message: str) -> int | None:
    """Read the size of the failed request, in bytes; None if the text is no allocator message.

    Example:
        >>> allocator_request_bytes("CUDA out of memory. Tried to allocate 20.00 MiB.")
        20971520
    """
    match = _REQUEST.search(message)
    if match is None or not float(match[1]):
        return None
    unit = "B" if match[2].lower() == "bytes" else match[2]
    return parse_bytes(match[1] + unit)


def fragmentation(message: str, budget_bytes: int) -> str:
    """Return what an allocator's cache withheld, if a request would fit beside all tensors; or "".

    Example:
        >>> message = "CUDA out of memory. Tried to allocate 5.00 GiB. Of the allocated memory "
        >>> message += "11.00 GiB is allocated by PyTorch, and 6.00 GiB is reserved by PyTorch but"
        >>> print(fragmentation(message, 20 * 1024**3))
        tensors held 11.0 GiB, and 6.0 GiB more was cached in pieces too small for the next 5.0 GiB
    """
    request, match = allocator_request_bytes(message), _HELD.search(message)
    if request is None or match is None:
        return ""
    held, cached = map(parse_bytes, match.groups())
    if held + request > budget_bytes:
        return ""
    return (
        f"tensors held {format_bytes(held)}, and {format_bytes(cached)} more was cached in pieces "
        f"too small for the next {format_bytes(request)}"
    )


def label(warning: str) -> str:
    """Return what to put before a warning. A described model (``hf:...: ...``) asks for no action.

    Example:
        >>> label("hf:gpt2: 124.4 M parameters are trained"), label("the CPU is busy")
        ('Note: ', 'Warning: ')
    """
    return "Note: " if is_language_model(warning) else "Warning: "


def bytes_or_dash(size: float | None) -> str:
    """Return a size as text; "-" if it is unknown."""
    return "-" if size is None else format_bytes(size)


def size_or_none_fits(batch_size: int) -> str:
    """Return a batch size as text; "none fits" for 0.

    Example:
        >>> size_or_none_fits(1024), size_or_none_fits(0)
        ('1,024', 'none fits')
    """
    return f"{batch_size:,}" if batch_size else "none fits"


def one_line(text: str) -> str:
    r"""Return a text on one line, with control codes spelled out.

    Error texts may contain anything: one escape code could recolor the whole terminal.

    Example:
        >>> print(one_line("went wrong:\n  \x1b[31mred"))
        went wrong: \x1b[31mred
    """
    line = " ".join(text.split())
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in line
    )


def place_in_step(stage: str, module: str, line: str) -> str:
    """Return where in a step something happens; module and line are "" if unknown.

    Example:
        >>> place_in_step("backward", "head", "train.py:12")
        'backward of head (train.py:12)'
    """
    return stage + (f" of {module}" if module else "") + (f" ({line})" if line else "")
