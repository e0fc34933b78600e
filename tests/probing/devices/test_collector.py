"""Collections within a search look at what the search has made only."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from batchfinder.probing.devices.collector import older_objects_spared


class Cycle:
    """Held by nothing but itself."""

    def __init__(self) -> None:
        self.myself = self


@pytest.fixture(autouse=True)
def _nothing_set_aside() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_is_made_inside_is_collected_inside() -> None:
    with older_objects_spared():
        made = weakref.ref(Cycle())
        gc.collect()
        assert made() is None


def test_what_was_there_before_is_not_looked_at_until_later() -> None:
    older = weakref.ref(Cycle())
    with older_objects_spared():
        gc.collect()
        assert older() is not None
    gc.collect()
    assert older() is None
    assert gc.get_freeze_count() == 0


def test_an_error_ends_it_too() -> None:
    with pytest.raises(KeyError), older_objects_spared():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_objects_that_somebody_has_set_aside_stay_there() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with older_objects_spared():
        pass
    assert gc.get_freeze_count() >= before
