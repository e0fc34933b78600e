"""Make a sample from the text of ``--input``, which gives a dtype and a shape per tensor."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchfinder.errors import UsageError

# Examples in a sample. With only one, a batch dimension could be mistaken for another dimension
# of size 1.
BATCH_SIZE = 2
# The most numbers in one tensor. An example of a large volume of voxels has a thousandth of it.
MOST_NUMBERS = 2**32
# Integers are below this. 0 and 1 are valid labels for any classifier, and valid token ids.
DEFAULT_BOUND = 2

_FORM = (
    "write a dtype and the shape of one example for each tensor, with spaces between tensors, "
    'as in "float32[3,224,224] int64[]:1000" (integers below 1000)'
)
_ITEM = re.compile(r"\s*(\w+)\s*\[([\d,\s]*)\](?::(\d+))?(?=\s|$)", re.ASCII)
_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def parse_input_spec(spec: str) -> Any:
    """Make a sample from a text such as ``"float32[3,224,224] int64[]:1000"``.

    The batch dimension is not part of the text. Floating-point values come from a normal
    distribution, and integers from 0 to below the bound after the colon (default 2). The function
    has its own random generator. The same text always gives the same values, and the user's random
    numbers do not change.

    Args:
        spec: one item per tensor, ``DTYPE[SHAPE]`` or ``DTYPE[SHAPE]:BOUND``, separated by spaces.
            A dtype has its name in torch, or is fp32, fp16 or bf16.

    Returns:
        A batch of 2 examples: a tensor for one item, a tuple of tensors for several.

    Example:
        >>> images, labels = parse_input_spec("float32[3,224,224] int64[]:1000")
        >>> tuple(images.shape), labels.dtype
        ((2, 3, 224, 224), torch.int64)
    """
    items = []
    end = 0
    while spec[end:].strip():
        item = _ITEM.match(spec, end)
        if item is None:
            raise UsageError(
                f"--input {spec!r} cannot be read from {spec[end:].strip()!r} on: {_FORM}"
            )
        items.append(_parse_item(item))
        end = item.end()
    if not items:
        raise UsageError(f"--input is empty: {_FORM}")
    generator = torch.Generator().manual_seed(0)
    tensors = [_make_tensor(item, generator) for item in items]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


class _Item(NamedTuple):
    """One tensor of a sample; ``bound`` is that of integers, None for other numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bound: int | None


def _parse_item(item: re.Match[str]) -> _Item:
    name, shape_text, bound_text = item.groups()
    text = item.group().strip()
    dtype = getattr(torch, _SHORT_NAMES.get(name, name), None)
    if dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise UsageError(f"--input {text!r}: {name!r} is not one of the dtypes {known}; {_FORM}")
    sizes = [size.strip() for size in shape_text.split(",")] if shape_text.strip() else []
    if not all(_is_count(size) for size in sizes):
        raise UsageError(f"--input {text!r}: sizes must be whole numbers from 1 on; {_FORM}")
    shape = (BATCH_SIZE, *map(int, sizes))
    if math.prod(shape) > MOST_NUMBERS:
        raise UsageError(f"--input {text!r}: that many numbers in one example is a slip; {_FORM}")

    if dtype.is_floating_point or dtype.is_complex:
        if bound_text is not None:
            raise UsageError(f"--input {text!r}: only integers have a bound; {_FORM}")
        return _Item(dtype, shape, None)
    # torch.randint takes a bound of 64 bits.
    largest = 2 if dtype is torch.bool else min(torch.iinfo(dtype).max + 1, 2**63 - 1)
    bound = DEFAULT_BOUND
    if bound_text is not None:
        bound = int(bound_text) if _is_count(bound_text) else 0
    if not 1 <= bound <= largest:
        raise UsageError(f"--input {text!r}: the bound must be from 1 to {largest}; {_FORM}")
    return _Item(dtype, shape, bound)


def _make_tensor(item: _Item, generator: torch.Generator) -> Tensor:
    dtype, shape, bound = item
    # The device is named because the user may have set another default.
    if bound is None:
        drawn = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=drawn, device="cpu").to(dtype)
    integers = torch.randint(bound, shape, generator=generator, dtype=torch.int64, device="cpu")
    return integers.to(dtype)


def _is_count(text: str) -> bool:
    """Return True for a whole number from 1 on of at most 20 digits, enough for 64 bits."""
    return text.isdigit() and len(text) <= 20 and int(text) > 0
