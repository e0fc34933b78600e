"""Marks for tests that need a feature of PyTorch."""

from __future__ import annotations

import pytest

from batchfinder.training.parallel import has_fully_shard_on_cpu

needs_fully_shard = pytest.mark.skipif(
    not has_fully_shard_on_cpu(), reason="fully_shard needs a GPU before PyTorch 2.7"
)
FSDP = pytest.param("fsdp", marks=needs_fully_shard)
