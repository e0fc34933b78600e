"""Limit the memory of a process that trains, and read its peaks. Imports no batchfinder."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# Memory of a process's CUDA context, kernels and library handles (probing/devices/cuda.py).
CONTEXT_BYTES = 512 * 1024**2


class Memory:
    """Limit and read the memory of this process, on the CPU or on one CUDA device.

    Attributes:
        index: the index of the CUDA device that trains; None if the CPU does, or none is known.
        facts: the device's name and memory, once it is known.
    """

    def __init__(self, torch: ModuleType, order: dict[str, Any], process_peak: Any) -> None:
        self._torch: Any = torch
        self._order = order
        self._cpu_budget: int | None = order["cpu_budget_bytes"]
        self._limits_before = resource.getrlimit(resource.RLIMIT_DATA)
        self._limited: dict[int, dict[str, Any]] = {}
        self._process_peak = process_peak  # as ``find`` reads it on the CPU
        self.index: int | None = None
        self.facts: dict[str, Any] = {}

    def install(self) -> None:
        """Limit the CPU."""
        self.limit_cpu()
        os.register_at_fork(after_in_child=self._lift)
        self.reset()

    def limit_cpu(self) -> None:
        """Limit this process on the CPU. A fork that turns out to train is limited again."""
        if self._cpu_budget is not None:
            limits = (self._cpu_budget, self._limits_before[1])
            resource.setrlimit(resource.RLIMIT_DATA, limits)

    def _lift(self) -> None:
        # Most forks are workers of a DataLoader. Their memory is not limited.
        if self._cpu_budget is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._limits_before)

    def begin_cuda(self) -> None:
        """Limit the device that trains, if it is known already.

        Another device must not be touched: this process would add a context there, which needs
        memory. A process of a spawned job tells only later which one it uses.
        """
        count = self._torch.cuda.device_count()
        rank = os.environ.get("LOCAL_RANK", "0" if count == 1 else "")
        # If another program has filled it, the script may train on another one, limited later.
        with contextlib.suppress(RuntimeError):
            if rank:
                self.limit_cuda(int(rank) % max(1, count))

    def limit_cuda(self, index: int) -> None:
        """Let the caching allocator of a device run out of memory at the budget."""
        if index in self._limited:
            return
        cuda, order = self._torch.cuda, self._order
        with cuda.device(index):
            elsewhere, total = self._outside_and_total(index)
            context = min(elsewhere, CONTEXT_BYTES)
            # As in find, memory beyond a limit of the user's allocator settings counts as used.
            read = getattr(cuda, "get_per_process_memory_fraction", None)
            share = min(1.0, read(index)) if read else 1.0
            elsewhere = max(elsewhere, total - math.floor(share * total))
            others = elsewhere - context
            usable = min(order["limit_bytes"] or total, total - others)
            budget = math.floor((usable - context) * (1 - order["headroom"]))
            budget = order["cuda_budget_bytes"] or budget
            cuda.set_per_process_memory_fraction(max(0.0, min(1.0, budget / total)), index)
        name = cuda.get_device_name(index)
        self._limited[index] = {
            "device": f"cuda:{index} {name}",
            "capacity_bytes": total,
            "used_by_others_bytes": others,
            "budget_bytes": budget,
            "outside_before": elsewhere,
        }

    def _outside_and_total(self, index: int) -> tuple[int, int]:
        cuda = self._torch.cuda
        free, total = cuda.mem_get_info(index)
        if cuda.get_device_properties(index).is_integrated and not self._torch.version.hip:
            # Files in the host's cache are no use of it (probing/devices/cuda.py).
            text = Path("/proc/meminfo").read_text()
            if found := re.search(r"^MemAvailable: *(\d+) kB", text, re.MULTILINE):
                free = max(free, min(total, 1024 * int(found[1])))
        return max(0, total - free - cuda.memory_reserved(index)), total

    def outside(self) -> int:
        """Return the bytes of the device in use outside the allocator; 0 on the CPU."""
        return 0 if self.index is None else self._outside_and_total(self.index)[0]

    def train_on_fullest(self, trained: set[Any]) -> None:
        """Note the CUDA device that is closest to its limit, and limit each that holds memory.

        A model may span several devices. Its parameters may wait on the CPU for their turn.

        Args:
            trained: the devices of the parameters that are trained; empty if they are not known.
        """
        cuda = self._torch.cuda
        devices = range(cuda.device_count() if cuda.is_initialized() else 0)
        held = {each: cuda.max_memory_reserved(each) for each in devices}
        for index in filter(held.get, held):
            self.limit_cuda(index)
        of_model = {each.index for each in trained if each.type == "cuda"} & {*self._limited}
        among = of_model or {index for index in self._limited if held.get(index)}
        if among:
            budgets = {index: self._limited[index]["budget_bytes"] for index in among}
            self.index = min(among, key=lambda index: budgets[index] - held[index])
            self.facts = {**self._limited[self.index], "budget_bytes": min(budgets.values())}
        elif self.index is None:
            self.train_on(next(iter(trained), self._torch.device("cpu")))

    def train_on(self, device: Any) -> None:
        """Note the device that the parameters are on."""
        if device.type == "cuda":
            index = self._torch.cuda.current_device() if device.index is None else device.index
            self.limit_cuda(index)
            self.index, self.facts = index, self._limited[index]
        elif self.index is None:
            self.limit_cpu()
            self.facts = {"device": device.type}

    def reset(self) -> None:
        """Start a new peak."""
        if self.index is not None:
            self._torch.cuda.reset_peak_memory_stats(self.index)
        else:
            self._process_peak.reset()

    def peaks(self) -> dict[str, int]:
        """Return the most bytes that tensors and the allocator held since :meth:`reset`."""
        if self.index is not None:
            cuda, index = self._torch.cuda, self.index
            allocated, reserved = cuda.max_memory_allocated(index), cuda.max_memory_reserved(index)
            return {"allocated": allocated, "reserved": reserved}
        peak = self._process_peak.read()
        return dict.fromkeys(("allocated", "reserved"), min(peak, self._cpu_budget or peak))

    def wait(self) -> None:
        """Wait until CUDA has run what was asked of it: a kernel may fail, or take long, only then.

        Ranks do not wait here: another one may have to go on first.
        """
        cuda = self._torch.cuda
        if (
            self.index is not None
            and not self._has_ranks()
            and not cuda.is_current_stream_capturing()
        ):
            cuda.synchronize(self.index)

    def _has_ranks(self) -> bool:
        distributed = self._torch.distributed
        return bool(distributed.is_available() and distributed.is_initialized())

    def identity(self) -> dict[str, Any]:
        """Return the process's rank, its versions, and the facts about its device."""
        torch = self._torch
        rank, world_size = 0, 1
        if self._has_ranks():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return {
            "rank": rank,
            "world_size": world_size,
            "processes": int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            **self.facts,
        }

    def allocation_retries(self) -> int:
        """Return how often the allocator has flushed its cache to find room."""
        if self.index is None:
            return 0
        return int(self._torch.cuda.memory_stats(self.index).get("num_alloc_retries", 0))
