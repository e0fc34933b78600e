"""Exchange data between the ranks of a job through a key-value store in host memory.

Collectives fail or hang if one rank fails; the store of torch.distributed does not. It works while
a device is full and while other ranks hang, and it shows which rank is missing. The job has started
its server already: torchrun, or the process group of the user's script.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous

from batchfinder.errors import RankError
from batchfinder.probing.ranks.job import Job

# A rank that has not arrived by then will not arrive. All ranks load the same target, so they
# differ only by the speed of their disks.
ARRIVAL_SECONDS = 300.0

# Pauses between looks for the other ranks. They start short, because most ranks arrive quickly.
_SHORTEST_NAP_SECONDS = 0.0005
_LONGEST_NAP_SECONDS = 0.05

_meetings = count()


class Meeting:
    """An exchange of data between all ranks of a job.

    Every rank must make the same calls in the same order.

    Args:
        job: the rank of this process, and the number of ranks.
        store: a store that all ranks share. No other job may use it under the same prefix.
        arrival_seconds: time to wait for a rank.

    Example:
        >>> from torch.distributed import HashStore
        >>> Meeting(Job(), HashStore()).gather("here")
        ['here']
    """

    def __init__(self, job: Job, store: Store, arrival_seconds: float = ARRIVAL_SECONDS) -> None:
        self.job = job
        self.arrival_seconds = arrival_seconds
        self._store = store
        self._round = 0

    def gather(self, said: Any) -> list[Any]:
        """Send plain data, ready for JSON, to all ranks; wait for theirs, and return it by rank.

        Raises:
            RankError: a rank did not arrive in time or has left. The message names it.
        """
        this, self._round = self._round, self._round + 1
        self._set(f"{this}/{self.job.rank}", json.dumps(said))
        said_by = [f"{this}/{rank}" for rank in range(self.job.world_size)]
        deadline = time.monotonic() + self.arrival_seconds
        nap = _SHORTEST_NAP_SECONDS
        while True:
            # Read "left" first: a rank may send its data and leave between the two reads.
            has_left = self._has(["left"])
            if self._has(said_by):
                return [json.loads(self._get(key)) for key in said_by]
            if has_left:
                self.check_left()
            if time.monotonic() > deadline:
                late = [rank for rank, key in enumerate(said_by) if not self._has([key])]
                raise self._missing(late)
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Check that all ranks have the same facts; see :func:`check_same`.

        Raises:
            RankError: their facts differ, or a rank is missing.
        """
        check_same(self.gather(facts))

    def raise_alarm(self) -> None:
        """Tell the other ranks, before the next gathering, that this rank has failed."""
        self._set(f"{self._round}/alarm", "")

    def is_alarmed(self) -> bool:
        """Return True if any rank has raised the alarm for the next gathering.

        Raises:
            RankError: a rank has left.
        """
        self.check_left()
        return self._has([f"{self._round}/alarm"])

    def leave(self, reason: str) -> None:
        """Tell the other ranks that this rank has left, so that they stop waiting."""
        try:
            self._set("left", f"rank {self.job.rank} has left the search: {reason}")
        except RankError:
            return  # the store has ended, so no rank can be reached

    def check_left(self) -> None:
        """Raise a RankError if any rank has left."""
        if self._has(["left"]):
            raise RankError(self._get("left"))

    def _missing(self, ranks: Sequence[int]) -> RankError:
        who = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        return RankError(
            f"rank{'s' if len(ranks) > 1 else ''} {who} of {self.job.world_size} did not arrive "
            f"within {self.arrival_seconds:.0f} s. Try starting the same search on every rank",
            is_known_to_rank_0=0 not in ranks,
        )

    def _has(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda: self._store.check(keys)))

    def _set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def _get(self, key: str) -> str:
        value: bytes = self._ask(lambda: self._store.get(key))
        return value.decode()

    def _ask(self, question: Any) -> Any:
        try:
            return question()
        except RuntimeError as error:  # DistError and its subclasses
            reason = str(error).partition("\n")[0]
            raise RankError(
                f"the store of the job cannot be reached ({reason}), most likely because rank 0 or "
                "torchrun has ended. Try reading the last lines that they printed",
                is_known_to_rank_0=False,
            ) from None


def check_same(facts: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks have the same facts.

    Raises:
        RankError: a fact differs. The message names it, the two ranks and their values.
    """
    first, *others = facts
    for rank, other in enumerate(others, 1):
        for name in first:
            if other[name] != first[name]:
                raise RankError(
                    f"the ranks do not agree on {name}: rank 0 has {first[name]}, rank {rank} "
                    f"has {other[name]}. Try starting all ranks with the same one"
                )


def open_meeting(arrival_seconds: float = ARRIVAL_SECONDS) -> Meeting:
    """Open a meeting with the other ranks of this job.

    They are the ranks of the current process group. Without one, they are torchrun's processes.

    Raises:
        RankError: the other ranks cannot be reached.
    """
    prefix = f"batchfinder/{next(_meetings)}"
    job = Job.from_environment()
    if dist.is_initialized():
        store = PrefixStore(prefix, _get_default_store())
        rank, world_size = dist.get_rank(), dist.get_world_size()
        meeting = Meeting(Job(rank, world_size), store, arrival_seconds)
        hosts = meeting.gather(socket.gethostname())
        ours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        meeting.job = Job(rank, world_size, ours.index(rank), len(ours))
        return meeting
    if job.world_size == 1:
        return Meeting(job, HashStore(), arrival_seconds)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = next(rendezvous("env://", timeout=timedelta(seconds=arrival_seconds)))[0]
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise RankError(
            f"the other ranks cannot be reached ({reason}). Try starting with torchrun",
            is_known_to_rank_0=False,
        ) from None
    return Meeting(job, PrefixStore(f"{restarts}/{prefix}", store), arrival_seconds)
