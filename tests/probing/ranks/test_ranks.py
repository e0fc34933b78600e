"""Ranks that train together: one verdict for all, and no rank left waiting for another."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from marks import FSDP
from probing.ranks.ranks import MIB, TARGETS, meetings, on_each, prober, search_on

from batchfinder import BatchSizeResult, Outcome, Status
from batchfinder.errors import BatchFinderError, RankError, UserCodeError
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.ranks.consensus import ONE_RANK_WARNING
from batchfinder.probing.ranks.prober import HANG_SECONDS
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.results.probe import Probe

pytestmark = pytest.mark.usefixtures("warm_workers")

LIMIT = 1200 * MIB
OPTIONS = ProbeOptions(device="cpu", memory_limit=2 * LIMIT, headroom=0)

# Starting workers, twice, on a busy machine.
STARTING_SECONDS = 60


def results(ends: list[BatchSizeResult | Exception]) -> list[BatchSizeResult]:
    assert all(isinstance(end, BatchSizeResult) for end in ends), ends
    return [end for end in ends if isinstance(end, BatchSizeResult)]


def probe_of(
    sizes: list[int], strategy: str, timeout: float | None = None, **arguments: Any
) -> list[list[Probe]]:
    """The probes of two ranks that try the same sizes, by rank."""
    options = ProbeOptions(**{**asdict(OPTIONS), "strategy": strategy})
    source = SetupSource(f"{TARGETS}/on_ranks.py:build", arguments)

    def rank(meeting: Any) -> list[Probe]:
        with prober(meeting, source, options, probe_timeout_seconds=timeout) as ours:
            return [ours.probe(size) for size in sizes]

    ends = on_each([lambda m=m: rank(m) for m in meetings(2)])  # type: ignore[misc]
    assert not [end for end in ends if isinstance(end, Exception)], ends
    return [end for end in ends if not isinstance(end, Exception)]


@pytest.mark.parametrize("strategy", ["ddp", FSDP])
def test_one_rank_out_of_memory_is_the_verdict_of_all_and_the_search_goes_on(
    strategy: str,
) -> None:
    first, second = probe_of([2, 3, 1], strategy, deed="oom", phase="forward", at=3)
    assert first == second
    assert [probe.outcome for probe in first] == [Outcome.FITS, Outcome.OOM, Outcome.FITS]
    assert first[1].limiting_rank == 1
    assert first[1].note.startswith("rank 1: CUDA out of memory")
    assert all(peak for peak in first[0].rank_peak_bytes)
    assert len(first[0].rank_peak_bytes) == 2


def test_ranks_that_ask_for_different_things_are_told_before_any_worker_starts() -> None:
    ends, seconds = search_on([LIMIT, LIMIT], "on_ranks.py:build", arguments=[{"at": 1}, {"at": 2}])
    assert [str(end) for end in ends] == [
        "the ranks do not agree on the target's arguments: rank 0 has {'at': 1}, rank 1 has "
        "{'at': 2}. Try starting all ranks with the same one"
    ] * 2
    assert all(isinstance(end, RankError) for end in ends)
    assert seconds < 5


def test_ranks_that_try_different_sizes_are_told_of_their_bounds() -> None:
    source = SetupSource(f"{TARGETS}/on_ranks.py:build", {})
    options = ProbeOptions(**{**asdict(OPTIONS), "strategy": "ddp"})

    def rank(meeting: Any) -> Probe:
        with prober(meeting, source, options) as ours:
            return ours.probe(2 + meeting.job.rank)

    ends = on_each([lambda m=m: rank(m) for m in meetings(2)])  # type: ignore[misc]
    assert [str(end) for end in ends] == [
        "the ranks do not agree on the batch size to try, and so on the bounds of the search: "
        "rank 0 has 2, rank 1 has 3. Try starting all ranks with the same one"
    ] * 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", FSDP])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_out_of_memory_in_each_phase_leaves_no_rank_waiting(phase: str, strategy: str) -> None:
    arguments = [{"deed": "oom", "phase": phase, "at": 3}]
    ends, seconds = search_on(
        [LIMIT, LIMIT], "on_ranks.py:build", strategy, arguments=arguments, max_batch_size=4
    )
    first, second = results(ends)
    assert first == second
    assert (first.batch_size, first.status, first.limiting_rank) == (2, Status.FOUND, 1)
    assert first.next_failure is not None
    assert first.next_failure.reason.startswith("rank 1: CUDA out of memory")
    assert seconds < len(first.probes) * HANG_SECONDS + STARTING_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", FSDP])
@pytest.mark.parametrize("limits", [(1000, 800), (700, 900, 1000, 800)])
def test_the_rank_with_the_least_memory_decides(limits: tuple[int, ...], strategy: str) -> None:
    ends, _ = search_on([limit * MIB for limit in limits], "on_ranks.py:build", strategy)
    every = results(ends)
    alone, _ = search_on([min(limits) * MIB], "on_ranks.py:build", strategy)
    (least,) = results(alone)
    assert all(one == every[0] for one in every)
    assert every[0].limiting_rank == limits.index(min(limits))
    assert every[0].world_size == len(limits)
    # gloo's buffers grow with the ranks.
    assert 0 <= least.batch_size - every[0].batch_size <= 1
    assert least.warnings == (ONE_RANK_WARNING,)
    assert str(every[0].accumulation_plan(every[0].batch_size * len(limits))).endswith(
        f"x 1 accumulation step x {len(limits)} ranks"
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", FSDP])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_worker_killed_once_costs_a_repetition_and_no_more(
    phase: str, strategy: str, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    first, second = probe_of(
        [2, 3], strategy, deed="kill", phase=phase, at=3, rank=0, once=str(once)
    )
    assert first == second
    assert [probe.outcome for probe in first] == [Outcome.FITS, Outcome.FITS]
    assert once.exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", FSDP])
def test_a_rank_that_always_dies_at_a_size(strategy: str) -> None:
    first, second = probe_of([3], strategy, deed="kill", at=3)
    assert first == second
    assert (first[0].outcome, first[0].limiting_rank) == (Outcome.OOM, 1)
    assert first[0].note.startswith("rank 1: the process was killed")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", FSDP])
def test_a_hang_ends_within_the_time_stated_and_the_search_goes_on(
    strategy: str, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    started = time.monotonic()
    first, second = probe_of([2, 3, 1], strategy, deed="hang", at=3, once=str(once))
    assert time.monotonic() - started < HANG_SECONDS + STARTING_SECONDS
    assert first == second
    assert [probe.outcome for probe in first] == [Outcome.FITS] * 3
    pid = int(once.read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", FSDP])
def test_a_size_that_always_hangs_has_failed(strategy: str) -> None:
    first, second = probe_of([2, 3], strategy, timeout=15, deed="hang", at=3)
    assert first == second
    assert first[1].outcome is Outcome.FAILED
    assert "hung: stopped after" in first[1].note


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (
            "on_ranks.py:build",
            [{"deed": "raise", "at": 1}],
            UserCodeError,
            "on rank 1: ValueError: no such width",
        ),
        (
            "on_ranks.py:build_of_nothing",
            [{}],
            BatchFinderError,
            "has no function build_of_nothing",
        ),
    ],
)
def test_an_error_of_one_rank_is_raised_by_all(
    function: str, arguments: list[dict[str, Any]], error: type[Exception], message: str
) -> None:
    ends, _ = search_on([LIMIT, LIMIT], function, arguments=arguments, max_batch_size=2)
    assert all(isinstance(end, error) for end in ends), ends
    assert all(message in str(end) for end in ends), ends
