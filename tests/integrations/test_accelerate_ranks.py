from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from integrations.test_accelerate import fits_up_to
from integrations.test_oom_guard_ranks import on_two_ranks

from batchfinder.errors import RankError
from batchfinder.integrations import ranks
from batchfinder.integrations.accelerate import find_executable_batch_size

MODULE = "integrations.test_accelerate_ranks"


def sizes_on_a_rank(rank: int, port: int, where: str) -> list[Any]:
    """The sizes that a rank tried, and its result or error. Rank 1 has less room."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    ranks.ANOTHER_SECONDS = 1.0
    tried: list[int] = []
    fit = fits_up_to(9 if rank else 11, tried)

    @find_executable_batch_size(starting_batch_size=12)
    def train(batch_size: int) -> int:
        if where != "without any":
            dist.all_reduce(torch.ones(1))
        fit(batch_size)
        if where == "before the last":
            dist.all_reduce(torch.ones(1))
        return batch_size

    try:
        ended: Any = train()
        dist.barrier()
    except (RankError, RuntimeError) as error:
        ended = f"{type(error).__name__}: {error}"
    return [tried, ended]


@pytest.mark.parametrize(
    ("where", "rank_0", "rank_1"),
    [("after the last", [12, 10, 9], [12, 10, 9]), ("without any", [12, 10], [12, 10, 9])],
)
def test_ranks_agree_on_a_size_if_they_run_collectives(
    where: str, rank_0: list[int], rank_1: list[int]
) -> None:
    answers = on_two_ranks(f"sizes_on_a_rank({{rank}}, {{port}}, {where!r})", MODULE)
    assert answers == [[rank_0, rank_0[-1]], [rank_1, rank_1[-1]]]


def test_a_rank_raises_if_others_wait_for_it_in_a_collective() -> None:
    (tried_0, ended_0), (tried_1, ended_1) = on_two_ranks(
        "sizes_on_a_rank({rank}, {port}, 'before the last')", MODULE
    )
    assert (tried_0, tried_1) == ([12, 10], [12, 10])  # both ran out at 12, and only rank 1 at 10
    assert ended_1.startswith("RankError: a rank ran out of memory at batch size 10 (CUDA out of")
    assert "RankError" not in ended_0  # its collective broke when rank 1 had ended
