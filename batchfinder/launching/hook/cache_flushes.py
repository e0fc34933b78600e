"""Report how often CUDA's allocator flushed its cache to find room. Imports no batchfinder."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class Flushes:
    """The flushes of this process, reported after an optimizer step if their number has changed."""

    def __init__(self, torch: ModuleType, report: Any) -> None:
        self._torch: Any = torch
        self._report = report
        self._told: int | None = None

    def install(self) -> None:
        """Follow every optimizer of this process."""
        optimizers: Any = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        cuda = self._torch.cuda
        if not cuda.is_initialized():
            return
        total = int(cuda.memory_stats().get("num_alloc_retries", 0))
        if total != self._told:
            self._told = total
            self._report("flushes", total=total)
