from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchfinder.errors import UsageError
from batchfinder.training.data.input_spec import parse_input_spec


def test_several_items_are_a_tuple() -> None:
    images, labels = parse_input_spec("float32[3,224,224] int64[]:1000")
    assert (images.dtype, images.shape) == (torch.float32, (2, 3, 224, 224))
    assert (labels.dtype, labels.shape) == (torch.int64, (2,))


def test_one_item_is_a_tensor() -> None:
    assert parse_input_spec("int32[7]:5").shape == (2, 7)


def test_spaces_are_free() -> None:
    first, second = parse_input_spec("  fp16 [ 3, 8 ]   bool[4]  ")
    assert (first.shape, second.shape) == ((2, 3, 8), (2, 4))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float64", torch.float64),
        ("double", torch.float64),
        ("fp32", torch.float32),
        ("half", torch.float16),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("complex64", torch.complex64),
        ("long", torch.int64),
        ("int32", torch.int32),
        ("int8", torch.int8),
        ("uint8", torch.uint8),
        ("bool", torch.bool),
    ],
)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    assert parse_input_spec(f"{name}[3]").dtype is dtype


def test_floats_are_drawn_from_a_normal_distribution() -> None:
    values = parse_input_spec("float32[50000]")
    assert abs(values.mean().item()) < 0.02
    assert abs(values.std().item() - 1) < 0.02


@given(st.sampled_from(["int64", "int32", "int16", "uint8"]), st.integers(1, 255))
def test_integers_are_below_their_bound(dtype: str, bound: int) -> None:
    values = parse_input_spec(f"{dtype}[200]:{bound}")
    assert values.min() >= 0
    assert values.max() < bound


def test_integers_without_bound_are_valid_for_every_classifier() -> None:
    assert parse_input_spec("int64[100]").unique().tolist() == [0, 1]


def test_the_largest_bounds() -> None:
    assert parse_input_spec("uint8[1000]:256").max() > 200
    assert parse_input_spec(f"int64[3]:{2**63 - 1}").shape == (2, 3)
    assert parse_input_spec("bool[100]:1").any().item() is False


def test_values_are_always_the_same_and_the_user_s_random_numbers_untouched() -> None:
    before = torch.get_rng_state()
    first = parse_input_spec("float32[8] int64[4]:100")
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    second = parse_input_spec("float32[8] int64[4]:100")
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, True]


def test_another_default_device_is_of_no_matter() -> None:
    with torch.device("meta"):
        sample = parse_input_spec("float32[3] int64[]")
    assert [x.device.type for x in sample] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "--input is empty"),
        ("   ", "--input is empty"),
        ("float32", "cannot be read from 'float32' on"),
        ("float32[3", r"cannot be read from 'float32\[3' on"),
        ("3,224,224", "cannot be read from '3,224,224' on"),
        (
            "float32[3],int64[]",
            r"cannot be read from 'float32\[3\],int64\[\]' on: .* spaces between",
        ),
        ("float32[3] int64[]:", r"cannot be read from 'int64\[\]:' on"),
        ("float32[3] int64[]:-1", r"cannot be read from 'int64\[\]:-1' on"),
        ("float32[-3]", "cannot be read"),
        ("float32[3.5]", "cannot be read"),
        ("float32[0]", r"'float32\[0\]': sizes must be whole numbers from 1 on"),
        ("float32[3,,4]", "sizes must be whole numbers from 1 on"),
        ("float32[99999999999]", "that many numbers in one example is a slip"),
        pytest.param(f"float32[{'9' * 5000}]", "sizes must be whole", id="size of 5000 digits"),
        pytest.param(f"int64[3]:{'9' * 5000}", "the bound must be", id="bound of 5000 digits"),
        ("float33[3]", "'float33' is not one of the dtypes float32, float16"),
        ("nn[3]", "'nn' is not one of the dtypes"),
        ("qint8[3]", "'qint8' is not one of the dtypes"),
        ("float32[3]:10", "only integers have a bound"),
        ("int64[3]:0", "the bound must be from 1 to 9223372036854775807"),
        ("uint8[3]:257", "the bound must be from 1 to 256"),
        ("bool[3]:3", "the bound must be from 1 to 2"),
    ],
)
def test_other_texts_are_refused_and_the_form_is_shown(spec: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as info:
        parse_input_spec(spec)
    assert '"float32[3,224,224] int64[]:1000"' in str(info.value)
    assert "\n" not in str(info.value)


@given(st.text(alphabet="float32int64[],: 0159abc-", max_size=20).filter(lambda s: len(s) < 15))
def test_no_text_raises_anything_else(spec: str) -> None:
    if any(len(size) > 3 for size in spec.replace("[", ",").replace("]", ",").split(",")):
        return  # well formed, but large
    try:
        sample = parse_input_spec(spec)
    except UsageError:
        return
    assert all(x.shape[0] == 2 for x in (sample if isinstance(sample, tuple) else (sample,)))


def test_nothing_is_made_before_the_whole_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: object, **__: object) -> None:
        pytest.fail("a tensor was made")

    monkeypatch.setattr(torch, "randn", made)
    with pytest.raises(UsageError, match="cannot be read from"):
        parse_input_spec("float32[3,999,999,99] nonsense")
