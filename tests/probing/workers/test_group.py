from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from batchfinder.errors import DeviceError, UsageError
from batchfinder.probing.ranks.job import Job
from batchfinder.probing.workers.group import (
    GroupInvitation,
    accelerator_number,
    device_of_rank,
    join,
)


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (("", ""), (0, 1)),
        (("0,1", "0,1"), (0, 1)),
        (("0", "1"), (0, 0)),
        (("2,3", "3,2"), (0, 0)),
        (("0,1", "0,2"), (0, 1)),
        (("GPU-8932f937", "GPU-d2f95d9e"), (0, 0)),
        (("0", ""), (0, 1)),
    ],
)
def test_a_launcher_shows_all_devices_to_all_ranks_or_each_its_own(
    visible: tuple[str, str], numbers: tuple[int, int]
) -> None:
    seen = [("here", one) for one in visible]
    jobs = [Job(rank, 2, rank, 2) for rank in range(2)]
    assert tuple(accelerator_number(job, seen) for job in jobs) == numbers


def test_what_ranks_see_on_other_machines_is_theirs() -> None:
    seen = [("one", "0"), ("one", "1"), ("two", "0,1"), ("two", "0,1")]
    jobs = [Job(rank, 4, rank % 2, 2) for rank in range(4)]
    assert [accelerator_number(job, seen) for job in jobs] == [0, 0, 0, 1]


def test_the_device_of_a_rank() -> None:
    assert device_of_rank("cpu", 3) == "cpu"
    assert device_of_rank("xpu", 3) == "xpu:3"
    with pytest.raises(UsageError, match=r"all ranks would share cuda:1\. Try --device cuda"):
        device_of_rank("cuda:1", 0)
    with pytest.raises(UsageError, match="there is no device 'gpu'"):
        device_of_rank("gpu", 0)


def test_a_backend_that_fails_is_named_by_the_last_line_of_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise dist.DistBackendError("NCCL error in: x.cpp:92\nLast error:\nCuda failure 801\n")

    store: Any = vars(dist)["TCPStore"]("localhost", 0, None, True, wait_for_workers=False)
    monkeypatch.setattr(dist, "all_reduce", fail)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    invitation = GroupInvitation("0", "localhost", store.port, 0, Job())
    with pytest.raises(DeviceError, match=r"cannot exchange data on cpu \(Cuda failure 801\)"):
        join(invitation, "cpu")
