"""Ranks of one job as threads of one process, each supervising workers that are real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.ranks.job import Job
from batchfinder.probing.ranks.meeting import Meeting
from batchfinder.probing.ranks.prober import RankProber, times_of_ranks
from batchfinder.probing.workers.process import WorkerProcess
from batchfinder.probing.workers.process_worker import ProcessWorker
from batchfinder.probing.workers.setup_source import SetupSource
from batchfinder.results.result import BatchSizeResult
from batchfinder.search.bounds import Bounds
from batchfinder.search.run import run_search

TARGETS = Path(__file__).parents[2] / "targets"
MIB = 2**20
ARRIVAL_SECONDS = 60.0

Answer = TypeVar("Answer")


def meetings(ranks: int, arrival_seconds: float = ARRIVAL_SECONDS) -> list[Meeting]:
    """The same meeting, as each of the ranks sees it."""
    store = HashStore()
    return [
        Meeting(Job(rank, ranks, rank, ranks), PrefixStore("test", store), arrival_seconds)
        for rank in range(ranks)
    ]


def on_each(actions: Sequence[Callable[[], Answer]]) -> list[Answer | Exception]:
    """What each rank's action returns or raises, all of them at once."""
    ends: list[Any] = [None] * len(actions)

    def run(rank: int) -> None:
        try:
            ends[rank] = actions[rank]()
        except Exception as error:  # noqa: BLE001 - it is what the test asks for
            ends[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


@contextmanager
def prober(
    meeting: Meeting, source: SetupSource, options: ProbeOptions, **settings: Any
) -> Iterator[RankProber]:
    launch = partial(WorkerProcess, False)
    worker = ProcessWorker(launch, source, step_times=times_of_ranks(), **settings)
    ours = RankProber(worker, source, options, meeting)
    try:
        yield ours
    finally:
        ours.close()


def search_on(
    limits: Sequence[int],
    function: str,
    strategy: str = "ddp",
    *,
    arguments: Sequence[dict[str, Any]] = ({},),
    timeout: float | None = None,
    max_batch_size: int | None = None,
) -> tuple[list[BatchSizeResult | Exception], float]:
    """Search on as many ranks as there are limits, each of which is what that rank alone has.

    Args:
        limits: bytes, by rank.
        function: a target beside this file's folder.
        strategy: as on the command line.
        arguments: of the target, by rank; one for all.
        timeout: of a probe.
        max_batch_size: the largest size that the search tries.

    Returns:
        What each rank came to, and how many seconds it took.
    """
    options = ProbeOptions(device="cpu", strategy=strategy, headroom=0)
    started = time.monotonic()

    def rank(meeting: Meeting) -> BatchSizeResult:
        number = meeting.job.rank
        source = SetupSource(f"{TARGETS}/{function}", arguments[number % len(arguments)])
        ours = replace(options, memory_limit=limits[number] * len(limits))
        with prober(meeting, source, ours, probe_timeout_seconds=timeout) as tries:
            return tries.agreed(run_search(tries, Bounds.of(1, max_batch_size)))

    ends = on_each([lambda m=m: rank(m) for m in meetings(len(limits))])  # type: ignore[misc]
    return ends, time.monotonic() - started
