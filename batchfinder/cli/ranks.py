"""Run a command on several ranks: only rank 0 reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec

from batchfinder.cli.exiting import CTRL_C, TERMINATED
from batchfinder.errors import BatchFinderError, RankError, UsageError
from batchfinder.probing.ranks.job import Job

P = ParamSpec("P")

# How long a rank that cannot take part tries to reach the others, in seconds.
TELLING_SECONDS = 10.0


def told_by_rank_0(command: Callable[P, int]) -> Callable[P, int]:
    """Let only rank 0 report how a command ended, because all ranks end alike.

    Other ranks exit 0, because torchrun kills the job on the first non-zero exit. Rank 0 may not
    have printed the answer by then.
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
    """Return this process's place among the ranks of its job.

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
    """Tell rank 0 why this rank cannot take part, if an error ends the block."""
    try:
        yield
    except BatchFinderError as error:
        tell_rank_0(str(error))
        raise


def tell_rank_0(refusal: str) -> None:
    """Tell rank 0 why this rank cannot take part, so that rank 0 does not wait for it."""
    if Job.from_environment().rank > 0:
        from batchfinder.probing.ranks.meeting import open_meeting

        with suppress(RankError):
            open_meeting(TELLING_SECONDS).leave(refusal)
