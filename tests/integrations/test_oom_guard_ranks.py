from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integrations.test_oom_guard import Small, batch_of, trained
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from warm import WarmPython

from batchfinder import OOMGuard
from batchfinder.errors import UsageError

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.filterwarnings("ignore:a batch of .* ran out of memory")


def test_synchronized_statistics_are_refused_on_several_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.SyncBatchNorm(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    OOMGuard(model, optimizer)
    monkeypatch.setattr("batchfinder.integrations.oom_guard.ranks", lambda: 2)
    with pytest.raises(UsageError, match=r"has SyncBatchNorm.*find --strategy ddp"):
        OOMGuard(model, optimizer)


class Branches(nn.Module):
    """A model of which each rank uses one branch; no rank uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.branches[dist.get_rank()](x)
        return y


def gradients_of_a_branch(rank: int, port: int) -> list[float | None]:
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    model = Branches()
    batch = torch.full((2, 1), 4.0 + rank)
    OOMGuard(model, torch.optim.SGD(model.parameters()), lambda y, _: y.mean()).backward(batch)
    dist.destroy_process_group()
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def test_ranks_that_use_other_parameters_average_as_ddp_does() -> None:
    for answer in on_two_ranks("gradients_of_a_branch({rank}, {port})"):
        assert answer == [2.0, 2.5, None]


def on_two_ranks(call: str, module: str = "integrations.test_oom_guard_ranks") -> list[Any]:
    """What a function of a test file returns on each of two ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"import json; from {module} import *; print(json.dumps({call}))"
    processes = [
        WarmPython("-c", code.format(rank=rank, port=port), PYTHONPATH=str(TESTS))
        for rank in (0, 1)
    ]
    answers = [process.communicate() for process in processes]
    for printed, errors in answers:
        assert printed, errors
    return [json.loads(printed) for printed, _ in answers]


def train_on_a_rank(rank: int, port: int, wrap: bool) -> tuple[int | None, list[int], list[Any]]:
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Small(8 if rank else 3)  # rank 0 has less room
    given = DistributedDataParallel(model) if wrap else model
    guard = OOMGuard(given, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch_of(16)
    guard.step((x[rank::2], y[rank::2]))
    dist.destroy_process_group()
    return guard.batch_size, model.seen[-4:], [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("wrap", [True, False])
def test_ranks_split_alike_and_train_as_one_process_does(wrap: bool) -> None:
    torch.manual_seed(0)
    expected = trained(Small(16), batch_of(16))
    for batch_size, last_seen, parameters in on_two_ranks(
        f"train_on_a_rank({{rank}}, {{port}}, {wrap})"
    ):
        assert (batch_size, last_seen) == (2, [2, 2, 2, 2])
        for ours, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs)
