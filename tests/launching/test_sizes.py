"""Whether a script really used the batch size that it was given."""

from __future__ import annotations

import pytest

from batchfinder.launching.sizes import Honored, SizesSeen


@pytest.mark.parametrize(
    ("launches", "last"),
    [
        ([(1, [[1, 64]]), (64, [[64, 64], [64]])], Honored.YES),
        ([(1, [[35, 1]]), (20, [[35, 20]])], Honored.YES),
        ([(1, [[1, 128]]), (8, [[1, 1000]])], Honored.YES),
        ([(1, [[32, 64]]), (64, [[32, 64]])], Honored.IGNORED),
        ([(1, [[32, 3, 8]]), (7, [[32, 3, 8]])], Honored.IGNORED),
        ([(1, [[1, 64]]), (64, [[50, 64]])], Honored.CAPPED),
        ([(50, [[50, 64]]), (99, [[50, 64]])], Honored.CAPPED),
        ([(64, [[32, 10]])], Honored.UNKNOWN),
        ([(64, [])], Honored.UNKNOWN),
    ],
)
def test_the_inputs_show_what_became_of_the_size(
    launches: list[tuple[int, list[list[int]]]], last: Honored
) -> None:
    seen = SizesSeen()
    assert [seen.note(size, shapes) for size, shapes in launches][-1] is last


def test_a_size_may_be_that_of_all_ranks() -> None:
    assert SizesSeen().note(64, [[32, 10]], ranks=2) is Honored.DIVIDED
