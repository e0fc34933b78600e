"""That outputs told from shapes alone are those of PyTorch's own kernels."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from batchfinder.simulation.kernels.elementwise import elementwise

SIZES = st.tuples(*[st.integers(1, 4)] * 4)
LAYOUTS = st.sampled_from([torch.contiguous_format, torch.channels_last])
MODE = FakeTensorMode()
DTYPES = st.sampled_from([torch.float16, torch.float32])


def images(
    sizes: tuple[int, ...], layout: torch.memory_format, spare: int, dtype: torch.dtype
) -> Tensor:
    """Some of the channels of an image, as the gradient of a concatenation is."""
    n, channels, height, width = sizes
    whole = torch.zeros(n, channels + spare, height, width, dtype=dtype)
    return whole.contiguous(memory_format=layout)[:, spare:]


@given(SIZES, LAYOUTS, LAYOUTS, st.integers(0, 2), st.integers(0, 2), DTYPES, DTYPES)
def test_sums_of_images_with_holes(
    sizes: tuple[int, ...],
    layout: torch.memory_format,
    other_layout: torch.memory_format,
    spare: int,
    other_spare: int,
    dtype: torch.dtype,
    other_dtype: torch.dtype,
) -> None:
    first = images(sizes, layout, spare, dtype)
    second = images(sizes, other_layout, other_spare, other_dtype)
    expected = first + second
    with MODE:
        told = elementwise((MODE.from_tensor(first), MODE.from_tensor(second)), {})

    if layout is other_layout and min(sizes) > 1:
        assert told is not None
    if told is not None:
        assert (told.shape, told.dtype) == (expected.shape, expected.dtype)
        sides = [side for side, size in enumerate(sizes) if size > 1]
        assert [told.stride(side) for side in sides] == [expected.stride(side) for side in sides]


@given(SIZES, st.tuples(*[st.booleans()] * 4), LAYOUTS, st.integers(0, 2))
def test_products_with_factors_of_some_sides(
    sizes: tuple[int, ...], ones: tuple[bool, ...], layout: torch.memory_format, spare: int
) -> None:
    first = images(sizes, layout, spare, torch.float32)
    factors = torch.zeros([1 if one else side for one, side in zip(ones, sizes, strict=True)])
    expected = first * factors
    with MODE:
        told = elementwise((MODE.from_tensor(first), MODE.from_tensor(factors)), {})

    if layout is torch.contiguous_format and min(sizes) > 1:
        assert told is not None
    if told is not None:
        assert told.shape == expected.shape
        sides = [side for side, size in enumerate(sizes) if size > 1]
        assert [told.stride(side) for side in sides] == [expected.stride(side) for side in sides]


def test_what_is_spread_is_left_to_pytorch() -> None:
    with MODE:
        spread = MODE.from_tensor(torch.zeros(1, 3)).expand(4, 3)
        assert elementwise((spread, spread), {}) is None
