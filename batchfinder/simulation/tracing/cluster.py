"""One rank of a data-parallel job on paper: the other ranks need not exist."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from batchfinder.errors import StepError, UsageError
from batchfinder.simulation.tracing.tracker import StorageTracker
from batchfinder.training.optimizer import make_optimizer
from batchfinder.training.parallel import fully_sharding, shard
from batchfinder.training.setup import OptimizerOfModel, TrainingSetup

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2")

# DistributedDataParallel reduces gradients in copies of them, of these sizes.
# https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
FIRST_BUCKET_BYTES = 1024**2
BUCKET_BYTES = 25 * 1024**2


@dataclasses.dataclass(frozen=True)
class Cluster:
    """How the ranks of a job share the model states.

    Attributes:
        strategy: ``"ddp"``: each has all of them. ``"zero1"``: the same, but each has the optimizer
            states of its part alone. ``"zero2"``: gradients and optimizer states are sharded, and
            parameters gathered for the whole step. ``"fsdp"``: all are sharded, and parameters
            gathered block by block.
        world_size: how many ranks there are.

    Raises:
        UsageError: there is no such strategy, or no rank.
    """

    strategy: str
    world_size: int

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(f"strategy is ddp, fsdp, zero1 or zero2, not {self.strategy!r}")
        if self.world_size < 1:
            raise UsageError(f"the world size must be at least 1, not {self.world_size}")

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are gathered, and cast by the policy of the sharding."""
        return self.strategy in ("fsdp", "zero2")

    @contextmanager
    def joined(self) -> Iterator[Any]:
        """The mesh of a process group in which all other ranks are made up.

        Raises:
            UsageError: this process belongs to a real job.
        """
        # PyTorch's own, for tests of what many ranks do.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            raise UsageError("this process has a process group; estimate in one that has none")
        dist.init_process_group("fake", rank=0, world_size=self.world_size, store=FakeStore())
        try:
            # Its ranks are read from a tensor, which no tensor without data would tell.
            mesh = init_device_mesh("cpu", (self.world_size,))
            with _parts_made_when_needed():
                yield mesh
        finally:
            dist.destroy_process_group()

    def spread(self, setup: TrainingSetup, mesh: Any, precision: str) -> TrainingSetup:
        """The setup as one of the ranks has it; its model is changed in place."""
        model = setup.model
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                # It would look for a GPU; beside the statistics, it keeps what BatchNorm keeps.
                module.forward = MethodType(_BatchNorm.forward, module)  # type: ignore[method-assign]
        if self.strategy == "ddp":
            return setup
        if isinstance(setup.optimizer, Optimizer):
            raise StepError(
                "the optimizer was made before the model states are sharded; give a factory such "
                "as lambda parameters: SGD(parameters), or its name"
            )
        if self.is_sharded:
            shard(model, mesh, precision, keep_gathered=self.strategy == "zero2")
            return setup
        if isinstance(setup.optimizer, OptimizerOfModel):
            raise StepError(
                f"{setup.optimizer.source} takes all parameters, of which each rank has a part "
                "here; give the optimizer's name or a factory"
            )
        part = _Part(largest_part(list(model.parameters()), self.world_size))
        return dataclasses.replace(setup, optimizer=make_optimizer(setup.optimizer, part))

    def buckets(self, model: nn.Module) -> list[Tensor]:
        """What DistributedDataParallel keeps to reduce the gradients in."""
        if self.is_sharded:
            return []
        left = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        buckets = []
        size = FIRST_BUCKET_BYTES
        while left > 0:
            buckets.append(torch.empty(min(size, left), dtype=torch.uint8))
            left, size = left - size, BUCKET_BYTES
        return buckets


class _Part(nn.Module):
    """What an optimizer is made for, in place of the whole model."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.part = nn.ParameterList(parameters)


def largest_part(parameters: list[nn.Parameter], parts: int) -> list[nn.Parameter]:
    """The largest part where whole parameters are dealt out, the largest first to the least laden.

    As ``ZeroRedundancyOptimizer`` does:
    https://docs.pytorch.org/docs/stable/distributed.optim.html
    """
    hands: list[list[nn.Parameter]] = [[] for _ in range(min(parts, len(parameters)))]
    loads = [0] * len(hands)
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        least = loads.index(min(loads))
        hands[least].append(parameter)
        loads[least] += parameter.numel()
    return hands[loads.index(max(loads))]


@contextmanager
def _parts_made_when_needed() -> Iterator[None]:
    """Let sharding make this rank's part of each parameter alone, not those of all ranks.

    What it costs would grow with their number. Where this PyTorch does it elsewhere, it does.
    """
    # The function names the module that it is offered in as its own; what it wraps does not.
    home = inspect.unwrap(fully_sharding().fully_shard).__module__.rpartition(".")[0]
    sharded = getattr(import_module(home), "_fsdp_param", None)
    original = getattr(sharded, "_chunk_with_empty", None)
    if original is None:
        yield
        return
    vars(sharded)["_chunk_with_empty"] = _Parts
    try:
        yield
    finally:
        vars(sharded)["_chunk_with_empty"] = original


class _Parts:
    """The parts of a tensor along a dimension, as ``torch.chunk`` makes them, each when asked."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        length = self._tensor.shape[self._dim]
        start = index * self._size
        if start >= length:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, length - start))


@contextmanager
def resizes_told(tracker: StorageTracker) -> Iterator[None]:
    """Tell a tracker when sharding gives the memory of gathered parameters back, or takes it again.

    That is done to storages, not by operators.
    """
    resize = torch.UntypedStorage.resize_

    def told(storage: torch.UntypedStorage, size: Any) -> Any:
        result = resize(storage, size)
        tracker.resized(storage)
        return result

    torch.UntypedStorage.resize_ = told  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
