from __future__ import annotations

import pytest
from hypothesis import given
from strategies import byte_counts, seconds

from batchfinder.errors import UsageError
from batchfinder.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    count,
    format_bytes,
    format_seconds,
    parse_bytes,
    positive,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24GB", 24 * GIB),
        ("24G", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("  1.5 GiB ", 3 * GIB // 2),
        ("512MiB", 512 * MIB),
        ("3 kB", 3 * KIB),
        ("2TiB", 2 * TIB),
        ("100B", 100),
        ("9007199254740993", 9007199254740993),
        (7, 7),
    ],
)
def test_a_size_is_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


def test_zero_is_valid_if_allowed() -> None:
    assert parse_bytes("0", least=0) == parse_bytes("0GiB", least=0) == 0
    with pytest.raises(UsageError):
        parse_bytes(-1, least=0)


@pytest.mark.parametrize(
    "text", ["", "GiB", "24 GiBs", "1e9", "-1GiB", "1,5GiB", "24 G i B", "\u0661GiB"]
)
def test_invalid_sizes_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a memory size\. Try 24GiB or 512MiB\."):
        parse_bytes(text)


def test_a_float_is_a_number_of_bytes() -> None:
    assert parse_bytes(0.5 * 2**30) == 2**29
    for text in (float("nan"), float("inf")):
        with pytest.raises(UsageError, match=r"is not a memory size"):
            parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.1B", 0, -5, 0.9])
def test_a_size_that_is_not_positive_is_refused(text: str | float) -> None:
    with pytest.raises(UsageError, match="must be positive"):
        parse_bytes(text)


def test_a_number_that_lacks_its_unit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'10' means 10 bytes. Try 10GiB."):
        parse_bytes("10")


@given(byte_counts)
def test_plain_bytes_are_read_exactly(size: int) -> None:
    assert parse_bytes(f"{size}B") == parse_bytes(size) == size


@given(byte_counts)
def test_formatted_sizes_are_read_back_within_their_decimal(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.051)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MIB - 1, "1.0 MiB"),
        (1000 * MIB, "1000.0 MiB"),
        (24 * GIB, "24.0 GiB"),
        (5000 * TIB, "5000.0 TiB"),
        (-3 * GIB, "-3.0 GiB"),
    ],
)
def test_a_size_is_written_in_the_largest_unit_that_fits(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0, "0.0 ms"),
        (0.0004, "0.4 ms"),
        (0.041, "41 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (9.99, "9.99 s"),
        (9.999, "10.0 s"),
        (59.9, "59.9 s"),
        (59.99, "1 min 0 s"),
        (83.2, "1 min 23 s"),
        (3599.9, "1 h 0 min"),
        (4000, "1 h 6 min"),
    ],
)
def test_a_duration_is_written_in_a_suitable_unit(duration: float, text: str) -> None:
    assert format_seconds(duration) == text


@given(seconds)
def test_a_duration_never_shows_sixty_of_a_unit(duration: float) -> None:
    text = format_seconds(duration)
    assert not text.startswith(("1000 ms", "60.0 s", "60 min"))
    assert not text.endswith((" 60 s", " 60 min"))


def test_a_number_has_its_noun_in_singular_or_plural() -> None:
    assert [count(number, "probe") for number in (0, 1, 2)] == ["0 probes", "1 probe", "2 probes"]


@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_a_number_of_examples_is_a_whole_one(value: object) -> None:
    assert positive("the batch size", 2) == 2
    with pytest.raises(UsageError, match="the batch size must be a whole number, not"):
        positive("the batch size", value)


@pytest.mark.parametrize("value", [0, -1])
def test_a_number_of_examples_is_at_least_1(value: int) -> None:
    with pytest.raises(UsageError, match=f"the batch size must be at least 1, not {value}"):
        positive("the batch size", value)
