"""Whether a script really used the batch size that it was given."""

from __future__ import annotations

import pytest

from batchfinder.launching.size_check import (
    Honored,
    SizesSeen,
    lengths_in,
    lengths_warning,
    remark_on,
)


@pytest.mark.parametrize(
    ("launches", "last"),
    [
        ([(1, [[1, 64]]), (64, [[64, 64], [64]])], Honored.YES),
        ([(1, [[35, 1]]), (20, [[35, 20]])], Honored.YES),
        ([(1, [[1, 128]]), (8, [[1, 1000]])], Honored.YES),
        ([(1, [[32, 64]]), (64, [[32, 64]])], Honored.IGNORED),
        ([(1, [[32, 3, 8]]), (7, [[32, 3, 8]])], Honored.IGNORED),
        ([(1, [[1, 64]]), (64, [[50, 64]])], Honored.CAPPED),
        ([(1, [[1, 300]]), (13, [[1, 300]])], Honored.IGNORED),
        ([(1, [[1, 300]]), (13, [[1, 270]])], Honored.IGNORED),
        ([(50, [[50, 64]]), (99, [[50, 64]])], Honored.CAPPED),
        ([(1, [[1, 64]]), (16, [[16, 64]]), (99, [[98, 64]])], Honored.YES),
        ([(16, [[16, 64]]), (99, [[96, 64]])], Honored.YES),
        ([(15, [[8, 64]]), (99, [[96, 64]])], Honored.YES),
        ([(15, [[15, 64]]), (99, [[98, 64]])], Honored.CAPPED),
        ([(16, [[16, 64]]), (99, [[98, 64]]), (200, [[98, 64]])], Honored.CAPPED),
        ([(1, [[64, 90], [192, 90]]), (39, [[2496, 90], [7488, 90]])], Honored.YES),
        ([(1, [[2, 64]]), (50, [[100, 64]]), (80, [[100, 64]])], Honored.CAPPED),
        ([(64, [[32, 10]])], Honored.UNKNOWN),
        ([(64, [])], Honored.UNKNOWN),
    ],
)
def test_the_inputs_show_what_became_of_the_size(
    launches: list[tuple[int, list[list[int]]]], last: Honored
) -> None:
    seen = SizesSeen()
    assert [seen.note(size, shapes) for size, shapes in launches][-1] is last


def test_inputs_in_chunks_of_one_size_grow_in_number() -> None:
    seen = SizesSeen()
    assert seen.note(1024, [[65536, 90]], elements=4 * 65536 * 90) is Honored.UNKNOWN
    assert seen.note(4096, [[65536, 90]], elements=16 * 65536 * 90) is Honored.YES
    assert seen.note(8192, [[65536, 90]], elements=16 * 65536 * 90) is Honored.CAPPED


def test_two_views_of_each_example_are_not_two_examples() -> None:
    seen = SizesSeen()
    assert seen.note(1, [[2, 64]]) is Honored.UNKNOWN
    assert seen.note(64, [[100, 64]]) is Honored.YES
    assert seen.note(99, [[100, 64]]) is Honored.CAPPED
    assert seen.examples == 50


def test_a_size_may_be_that_of_all_ranks_also_if_it_is_no_multiple_of_them() -> None:
    seen = SizesSeen()
    assert seen.note(64, [[32, 10]], ranks=2) is Honored.DIVIDED
    assert seen.note(65, [[32, 10]], ranks=2) is Honored.DIVIDED


@pytest.mark.parametrize(("multiple_of", "advises"), [(1, True), (3, True), (2, False), (4, False)])
def test_multiples_of_the_ranks_are_advised_unless_the_sizes_are_such(
    multiple_of: int, advises: bool
) -> None:
    text = remark_on(Honored.DIVIDED, 64, 32, ranks=2, multiple_of=multiple_of)
    assert text.startswith("the script divides the batch size by its 2 ranks: each had 32 examples")
    assert ("--multiple-of 2" in text) is advises


@pytest.mark.parametrize(
    ("room", "outside", "inside", "is_named"),
    [
        (0.0, "", "", True),
        (0.0, "MALLOC_MMAP_THRESHOLD_", "", False),
        (0.0, "", "GLIBC_TUNABLES", False),
        (0.05, "", "", False),  # a GPU has no heap
    ],
)
def test_where_lengths_differ_on_the_cpu_a_setting_against_holes_in_the_heap_is_named(
    room: float, outside: str, inside: str, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    if outside:
        monkeypatch.setenv(outside, "1048576")
    text = lengths_warning(room, {inside: "1"})
    assert ("GLIBC_TUNABLES=" in text) is is_named
    assert ("a further 5% of the memory stays free" in text) is bool(room)


def test_a_smaller_last_batch_has_the_same_lengths() -> None:
    assert lengths_in([(8, 512), (8,)]) == lengths_in([(3, 512), (3,)])
    assert lengths_in([(8, 512)]) != lengths_in([(8, 300)])
