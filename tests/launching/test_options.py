"""What the options of ``run`` mean for each launch."""

from __future__ import annotations

import pytest

from batchfinder.launching.options import RunOptions, cpu_memory

GIB = 1024**3


@pytest.mark.parametrize("limit", [None, 2 * GIB])
def test_processes_share_the_memory_of_the_cpu_and_its_limit(limit: int | None) -> None:
    options = RunOptions(memory_limit=limit)
    (memory, budget), (half_memory, half_budget) = (cpu_memory(options, n) for n in (1, 2))
    assert half_budget == pytest.approx(budget / 2, rel=0.05)  # others use memory meanwhile
    assert half_memory.capacity_bytes == memory.capacity_bytes // 2
