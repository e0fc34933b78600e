from __future__ import annotations

import pytest

from batchfinder.errors import UsageError
from batchfinder.probing.ranks.job import Job
from batchfinder.probing.workers.group import accelerator_number, device_of_rank


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
