"""Each test begins with an allocator that keeps nothing of the tests before it."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def _nothing_cached() -> None:
    """What a model takes depends on the holes that it comes to lie in, by up to 1 MiB a block."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
