from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from functools import partial

import pytest

from batchfinder.simulation.recordings import side_by_side
from batchfinder.simulation.recordings.side_by_side import first_that_fails

# Built-in functions, as the processes import no tests.
below_seven = partial(map, partial(operator.gt, 7))


@pytest.mark.parametrize("cores", [1, 3, 100])
def test_the_first_number_of_all_is_found(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(side_by_side, "_cores", lambda: cores)
    assert first_that_fails(below_seven, range(3, 20)) == 7
    assert first_that_fails(below_seven, range(7)) is None
    assert first_that_fails(below_seven, ()) is None


def test_what_other_processes_cannot_answer_this_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_cores", lambda: 2)
    assert first_that_fails(only_known_here, range(3, 20)) == 7
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert first_that_fails(below_seven, range(3, 20)) == 7


def only_known_here(numbers: Sequence[int]) -> list[bool]:
    """Tell whether numbers are below seven; the processes do not find this function."""
    return [number < 7 for number in numbers]
