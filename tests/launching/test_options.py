"""What the options of ``run`` mean for each launch."""

from __future__ import annotations

import pytest

from batchfinder.errors import DeviceError
from batchfinder.launching.options import RunOptions, cpu_memory, only_device

GIB = 1024**3


@pytest.mark.parametrize("limit", [None, 2 * GIB])
def test_processes_share_the_memory_of_the_cpu_and_its_limit(limit: int | None) -> None:
    options = RunOptions(memory_limit=limit)
    (memory, budget), (half_memory, half_budget) = (cpu_memory(options, n) for n in (1, 2))
    assert half_budget == pytest.approx(budget / 2, rel=0.05)  # others use memory meanwhile
    assert half_memory.capacity_bytes == memory.capacity_bytes // 2


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "2, 3"}, {"CUDA_VISIBLE_DEVICES": "3"}),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c"}, {"CUDA_VISIBLE_DEVICES": "MIG-b"}),
        (
            {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "6,7"},
            {"HIP_VISIBLE_DEVICES": "7"},
        ),
    ],
)
def test_a_script_gets_the_device_that_has_this_number_here(
    environment: dict[str, str], shown: dict[str, str]
) -> None:
    assert only_device(1, environment) == shown


def test_a_device_that_is_not_visible_is_named() -> None:
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES is 3"):
        only_device(1, {"CUDA_VISIBLE_DEVICES": "3"})
