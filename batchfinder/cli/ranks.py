"""What a command does where it is one of several ranks: rank 0 speaks for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec

from batchfinder.cli.signals import CTRL_C, TERMINATED
from batchfinder.errors import BatchFinderError, RankError, UsageError
from batchfinder.probing.ranks.job import Job

P = ParamSpec("P")

# Within this time a rank that has nothing but bad news reaches the others, if it does at all.
TELLING_SECONDS = 10.0


def told_by_rank_0(command: Callable[P, int]) -> Callable[P, int]:
    """Leave it to rank 0 to tell how a command ended: all ranks came to the same end.

    The others end well. Whatever started them ends the whole job with the first that does not, and
    rank 0 may not have printed the answer by then.
    """

    @wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> int:
        if Job.from_environment().rank == 0:
            return command(*arguments, **options)
        try:
            status = command(*arguments, **options)
        except BatchFinderError as error:
            if isinstance(error, RankError) and not error.is_known_to_rank_0:
                raise
            return 0
        return status if status in (CTRL_C, TERMINATED) else 0

    return run


def check_job(strategy: str | None) -> Job:
    """This process's place among the ranks of its job.

    Raises:
        UsageError: there are several ranks and no strategy.
    """
    job = Job.from_environment()
    if strategy is None and job.world_size > 1:
        raise UsageError(
            f"this is one of {job.world_size} ranks: add --strategy ddp or --strategy fsdp"
        )
    return job


@contextmanager
def refusals_told() -> Iterator[None]:
    """Let rank 0 know why this rank will not come."""
    try:
        yield
    except BatchFinderError as error:
        tell_rank_0(str(error))
        raise


def tell_rank_0(refusal: str) -> None:
    """Let rank 0 know why this rank will not come, as it would wait for it."""
    if Job.from_environment().rank > 0:
        from batchfinder.probing.ranks.meeting import open_meeting

        with suppress(RankError):
            open_meeting(TELLING_SECONDS).leave(refusal)
