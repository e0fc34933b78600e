"""The file of remembered answers, and what is done with one."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from fakes import FakeProber

from batchfinder.errors import BatchTooSmallError, CacheError
from batchfinder.results.cache import FILE, AnswerCache
from batchfinder.results.remembered import Remembered
from batchfinder.results.result import BatchSizeResult, Status
from batchfinder.search.head_start import Guess, HeadStart
from batchfinder.search.run import run_search

WRITER = """
import sys
from pathlib import Path
from batchfinder.results.cache import AnswerCache
cache = AnswerCache(Path(sys.argv[1]))
for number in range(40):
    key = f"{sys.argv[2]}-{number}"
    cache.remember(key, "find", {}, {"batch_size": number})
    assert cache.recall(key).result["batch_size"] == number
"""


def remembered(result: BatchSizeResult) -> Remembered:
    return Remembered.of(result.to_dict(), "2026-01-02 03:04+00:00")


def test_two_processes_lose_no_row(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name]) for name in "ab"
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    cache = AnswerCache(tmp_path)
    assert len(cache.answers()) == 80
    assert len(cache.answers("a-")) == 40
    assert (cache.clear(), cache.answers()) == (80, [])


def test_a_damaged_file_is_an_error_and_can_be_cleared(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("no database " * 100)
    cache = AnswerCache(tmp_path)
    with pytest.raises(CacheError, match="batchfinder cache clear"):
        cache.recall("a")
    assert cache.clear() == 0
    cache.remember("a", "find", {}, {})
    assert cache.recall("a") is not None


@pytest.mark.parametrize(
    "row", ["0, '[1]', '{}'", "0, '{}', '7'", "'never', '{}', '{}'", "1e30, '{}', '{}'"]
)
def test_a_damaged_row_is_an_error_too(row: str, tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path)
    cache.remember("a", "find", {}, {})
    with closing(sqlite3.connect(cache.path, isolation_level=None)) as connection:
        connection.execute(f"INSERT INTO answers VALUES ('b', 'find', {row})")
    with pytest.raises(CacheError, match="batchfinder cache clear"):
        cache.answers()
    assert cache.clear() == 0
    assert not cache.answers()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="BATCHFINDER_CACHE"):
        AnswerCache(tmp_path / "file").remember("a", "find", {}, {})


def test_a_folder_whose_name_is_too_long_is_an_error_only_when_written(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / ("x" * 300))
    assert cache.recall("a") is None
    with pytest.raises(CacheError, match="BATCHFINDER_CACHE"):
        cache.remember("a", "find", {}, {})


def test_a_file_that_stays_locked_is_an_error_but_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchfinder.results.cache.BUSY_SECONDS", 0.05)
    cache = AnswerCache(tmp_path)
    cache.remember("a", "find", {}, {})
    with closing(sqlite3.connect(cache.path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(CacheError, match=r"locked.*BATCHFINDER_CACHE") as refusal:
            cache.recall("a")
        assert not refusal.value.is_damaged
        with pytest.raises(CacheError, match=r"locked.*BATCHFINDER_CACHE"):
            cache.remember("b", "find", {}, {})
    assert cache.recall("a") is not None


def test_a_full_disk_is_an_error_and_loses_no_answer(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path)
    cache.remember("a", "find", {}, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (cache.path.stat().st_size, hard))
    try:
        with pytest.raises(CacheError, match="BATCHFINDER_CACHE") as refusal:
            cache.remember("b", "find", {}, {"text": "x" * 10**6})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not refusal.value.is_damaged
    assert [answer.key for answer in cache.answers()] == ["a"]


def test_a_remembered_answer_takes_one_confirmation() -> None:
    first = run_search(FakeProber())
    prober = FakeProber()
    again = run_search(prober, remembered=remembered(first))
    assert prober.sizes == prober.confirmed == [90]
    assert (again.batch_size, again.status) == (90, Status.FOUND)
    assert (again.next_failure, again.memory_model) == (first.next_failure, first.memory_model)
    assert again.remembered_from == "2026-01-02 03:04+00:00"


@pytest.mark.parametrize("change", [{"bytes_per_sample": 9}, {"bytes_per_sample": 20}])
def test_what_has_changed_unseen_is_found_by_the_confirmation(change: dict[str, float]) -> None:
    answer = remembered(run_search(FakeProber()))
    found = run_search(FakeProber(**change), remembered=answer)  # type: ignore[arg-type]
    assert (found.batch_size, found.remembered_from) == (
        run_search(FakeProber(**change)).batch_size,  # type: ignore[arg-type]
        None,
    )
    assert found.notes[0].startswith("the answer of 2026-01-02 03:04+00:00 was 90, but its confirm")


@pytest.mark.parametrize("least", [1, 2])
def test_an_answer_that_is_refuted_where_steps_are_replayed_is_searched_as_if_it_were_none(
    least: int,
) -> None:
    """Its failure would keep the search from recording small sizes, and from guessing by them."""
    too_small = {size: BatchTooSmallError("BatchNorm", least=least) for size in range(1, least)}
    answer = remembered(run_search(FakeProber(faults=too_small)))
    start = HeadStart(replay=lambda _: Guess(45))
    found = run_search(FakeProber(500), head_start=start)
    prober = FakeProber(500, faults=too_small)
    again = run_search(prober, head_start=start, remembered=answer)
    assert (again.batch_size, again.remembered_from) == (found.batch_size, None)
    assert len(again.probes) <= len(found.probes) + 1


@pytest.mark.parametrize(
    ("share", "suits"), [(1.0, True), (0.9, False), (1.01, False), (1.009, True)]
)
def test_another_amount_of_memory_is_another_search(share: float, suits: bool) -> None:
    answer = remembered(run_search(FakeProber()))
    assert answer.suits(round(share * 1000), is_repeatable=True) is suits


@pytest.mark.parametrize(("share", "suits"), [(1.008, True), (1.012, False)])
@pytest.mark.parametrize("lost", [0.0, 0.1])
def test_free_memory_may_differ_by_as_much_as_answers_do(
    share: float, suits: bool, lost: float
) -> None:
    """That is one example in a hundred. How much the allocator loses makes no difference."""
    answer = remembered(run_search(FakeProber(100_000, fragmentation=lost)))
    assert answer.suits(round(share * 100_000), is_repeatable=True) is suits


def test_the_budget_before_the_first_step_is_that_of_the_next_search(tmp_path: Path) -> None:
    cache, result = AnswerCache(tmp_path), run_search(FakeProber())
    cache.remember("a", "find", {"budget_bytes": 1200}, result.to_dict())
    found = cache.recall("a")
    assert found is not None
    answer = found.remembered()
    assert answer is not None
    assert answer.suits(1200, is_repeatable=True)
    assert not answer.suits(1000, is_repeatable=True)
