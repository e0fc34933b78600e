"""Ranks that meet in a store: all say their part, or it is told who does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
from probing.ranks.ranks import meetings, on_each

from batchfinder.errors import RankError
from batchfinder.probing.ranks.job import Job
from batchfinder.probing.ranks.meeting import Meeting, check_same, open_meeting


def test_each_hears_what_all_said_in_the_order_of_the_ranks() -> None:
    ours = meetings(3)
    talk: list[Callable[[], list[object]]] = [
        lambda m=m: [m.gather(m.job.rank), m.gather({"again": m.job.rank})]  # type: ignore[misc]
        for m in ours
    ]
    assert on_each(talk) == [[[0, 1, 2], [{"again": rank} for rank in range(3)]]] * 3


def test_a_rank_that_does_not_arrive_is_named_in_time() -> None:
    first, second, _ = meetings(3, arrival_seconds=0.5)
    started = time.monotonic()
    ends = on_each([lambda: first.gather(1), lambda: second.gather(1)])
    assert time.monotonic() - started < 3
    assert {str(end) for end in ends} == {
        "rank 2 of 3 did not arrive within 0 s. Try starting the same search on every rank"
    }
    assert all(isinstance(end, RankError) and end.is_known_to_rank_0 for end in ends)


def test_where_rank_0_is_missing_the_others_have_to_tell() -> None:
    _, second = meetings(2, arrival_seconds=0.1)
    with pytest.raises(RankError) as raised:
        second.gather(1)
    assert not raised.value.is_known_to_rank_0


def test_a_rank_that_leaves_lets_nobody_wait() -> None:
    first, second = meetings(2)
    second.leave("Ctrl-C")
    with pytest.raises(RankError, match=r"^rank 1 has left the search: Ctrl-C$"):
        first.gather("still here")


def test_what_was_said_before_leaving_is_heard() -> None:
    for _ in range(50):  # it depends on who is faster
        first, second = meetings(2)

        def say_and_leave(meeting: Meeting) -> list[object]:
            said = meeting.gather(meeting.job.rank)
            meeting.leave("done")
            return said

        ends = on_each([partial(say_and_leave, first), partial(say_and_leave, second)])
        assert ends == [[0, 1], [0, 1]]


def test_an_alarm_is_for_the_next_gathering_only() -> None:
    first, second = meetings(2)
    assert not first.is_alarmed()
    second.raise_alarm()
    assert first.is_alarmed()
    on_each([lambda: first.gather(1), lambda: second.gather(2)])
    assert not first.is_alarmed()


def test_a_fact_that_differs_is_told_with_both_sides() -> None:
    check_same([{"the device": "cpu"}] * 3)
    with pytest.raises(RankError, match="on the device: rank 0 has cpu, rank 2 has cuda"):
        check_same([{"the device": "cpu"}, {"the device": "cpu"}, {"the device": "cuda"}])


def test_a_process_that_nobody_started_as_a_rank_is_a_job_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    meeting = open_meeting()
    assert (meeting.job, meeting.gather("hello")) == (Job(), ["hello"])


def test_a_job_is_read_from_what_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert Job.from_environment() == Job(5, 8, 1, 4)
    monkeypatch.delenv("LOCAL_RANK")
    assert Job.from_environment() == Job()


def test_a_meeting_of_one_needs_nobody() -> None:
    (alone,) = meetings(1)
    assert isinstance(alone, Meeting)
    assert alone.gather([1]) == [[1]]
