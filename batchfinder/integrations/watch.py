"""The memory of each step of the user's own loop, and warnings before it runs out."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_stack
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchfinder.errors import BatchFinderWarning
from batchfinder.probing.devices.choose_device import choose_device
from batchfinder.probing.steadiness import left_behind
from batchfinder.results.probe import LEAK_WARNING
from batchfinder.units import count, format_bytes

# A step this close to the limit is one unlucky layout away from running out of memory.
CLOSE_SHARE = 0.98
# A leak is reported after this many steps in a row that each leave more memory in use. Caches of
# new sequence lengths also grow in some steps, but not in each.
LEAKING_STEPS = 20
# The modules between an optimizer's step in the user's code and this one.
LIBRARIES = ("torch.", "batchfinder.")


@dataclass(frozen=True)
class WatchedStep:
    """The memory of one optimizer step.

    Attributes:
        peak_allocated_bytes: most bytes that tensors held at any moment.
        peak_reserved_bytes: most bytes that the caching allocator held.
        allocation_retries: times that the allocator flushed its cache.
        in_use_bytes: bytes that tensors hold at the end of the step.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocation_retries: int
    in_use_bytes: int


@dataclass
class MemoryWatch:
    """The steps seen so far; ``print(watch)`` sums them up.

    Attributes:
        device: the device's name.
        limit_bytes: memory that this process may use on the device.
        steps: one record for each optimizer step.
        warnings: the warnings raised, by their kind: ``close``, ``flushing``, ``leak``.
    """

    device: str
    limit_bytes: int
    steps: list[WatchedStep] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The highest peak that counts against the limit, in bytes; 0 before the first step."""
        return max((step.peak_reserved_bytes for step in self.steps), default=0)

    def __str__(self) -> str:
        peak, limit = format_bytes(self.peak_bytes), format_bytes(self.limit_bytes)
        retries = sum(step.allocation_retries for step in self.steps)
        text = f"{count(len(self.steps), 'step')} on {self.device}: peak {peak} of {limit}"
        return f"{text}, cache flushed {count(retries, 'time')}" if retries else text

    def note(self, step: WatchedStep) -> None:
        """Record a step, and warn if it shows trouble."""
        before = self.steps[-1] if self.steps else None
        self.steps.append(step)
        number = len(self.steps)
        if before and before.allocation_retries and step.allocation_retries:
            self._warn(
                "flushing",
                f"the allocator flushed its cache in steps {number - 1} and {number}: that is "
                "slow, and memory may run out soon. Try a smaller batch size",
            )
        free = self.limit_bytes - step.peak_reserved_bytes
        if free < (1 - CLOSE_SHARE) * self.limit_bytes:
            self._warn(
                "close",
                f"step {number} came within {format_bytes(max(0, free))} of the memory limit, "
                f"{format_bytes(self.limit_bytes)}. Try a smaller batch size",
            )
        recent = [one.in_use_bytes for one in self.steps[-LEAKING_STEPS:]]
        if len(recent) == LEAKING_STEPS and left_behind(recent):
            self._warn("leak", LEAK_WARNING)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self.warnings:
            self.warnings[kind] = text
            # PyTorch wraps a step once, and once more where a scheduler follows the optimizer.
            names = (f.f_globals.get("__name__", "") for f, _ in walk_stack(sys._getframe()))
            level = next((n for n, name in enumerate(names) if not name.startswith(LIBRARIES)), 0)
            warnings.warn(text, BatchFinderWarning, stacklevel=level + 1)


@contextmanager
def watch_memory(device: str | torch.device | None = None) -> Iterator[MemoryWatch]:
    """Record the peak memory of each optimizer step in the block, and warn of trouble.

    It warns once of each: a step within 2 % of the memory limit; an allocator that flushes its
    cache step after step; memory in use that grows with every one of 20 steps (a leak). Steps of
    every ``torch.optim`` optimizer count. Each reading waits for the device, and resets its peak
    counters.

    Args:
        device: such as ``"cuda:0"`` or ``"cpu"``. Default: an accelerator if there is one.

    Yields:
        The record, which grows with each step.

    Raises:
        DeviceError: the device is unavailable.

    Example:
        >>> with watch_memory() as memory:  # doctest: +SKIP
        ...     for batch in loader:
        ...         train_step(batch)
        >>> print(memory)  # doctest: +SKIP
        1200 steps on cuda:0 NVIDIA H200: peak 130.1 GiB of 139.8 GiB
    """
    watched = choose_device(device)
    memory = watched.memory()
    watch = MemoryWatch(
        watched.name, memory.capacity_bytes - memory.used_by_others_bytes - memory.context_bytes
    )
    before = watched.allocation_retries()
    watched.reset_peaks()

    def after_step(*_: Any) -> None:
        nonlocal before
        peaks, retries = watched.peaks(), watched.allocation_retries()
        flushes, before = retries - before, retries
        in_use = watched.in_use_bytes()
        watch.note(WatchedStep(peaks.allocated_bytes, peaks.reserved_bytes, flushes, in_use))
        watched.reset_peaks()

    hook = register_optimizer_step_post_hook(after_step)
    try:
        yield watch
    finally:
        hook.remove()
