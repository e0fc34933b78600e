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
        torch._C._cuda_clearCublasWorkspaces()  # 64 MiB, as soon as a test has trained
        torch.cuda.empty_cache()
