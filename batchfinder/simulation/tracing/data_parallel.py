"""One simulated rank of a data-parallel job; the other ranks do not exist."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
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
from batchfinder.training.state.patching import replaced

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2")

# Sizes of the buffers in which DistributedDataParallel reduces gradients.
# https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
FIRST_BUCKET_BYTES = 1024**2
BUCKET_BYTES = 25 * 1024**2


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The number of ranks in a job, and how they share the model states.

    Attributes:
        strategy: ``"ddp"``: every rank has all states. ``"zero1"``: optimizer states are sharded.
            ``"zero2"``: gradients and optimizer states are sharded, and parameters are gathered for
            the whole step. ``"fsdp"``: everything is sharded, and parameters are gathered block by
            block.
        world_size: the number of ranks.
    """

    strategy: str
    world_size: int

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(f"strategy must be ddp, fsdp, zero1 or zero2, not {self.strategy!r}")
        if self.world_size < 1:
            raise UsageError(f"the world size must be at least 1, not {self.world_size}")

    @property
    def is_sharded(self) -> bool:
        """True if parameters are gathered, and cast by the sharding's own policy."""
        return self.strategy in ("fsdp", "zero2")

    @contextmanager
    def joined(self) -> Iterator[Any]:
        """Join a fake process group and yield its mesh."""
        # Before 2.8, only this import gives the collectives of sharding shapes without data.
        with suppress(ImportError):
            import_module("torch.distributed._tools.fake_collectives")
        # PyTorch's own fake group, made for its tests.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            raise UsageError(
                "this process belongs to a process group. Try the estimate in a process of its own."
            )
        dist.init_process_group("fake", rank=0, world_size=self.world_size, store=FakeStore())
        try:
            # Made here, outside the simulation: it reads ranks from a tensor with data.
            mesh = init_device_mesh("cpu", (self.world_size,))
            with _parts_made_when_needed():
                yield mesh
        finally:
            dist.destroy_process_group()

    def spread(self, setup: TrainingSetup, mesh: Any, precision: str) -> TrainingSetup:
        """Return the setup of one rank; the model is changed in place."""
        model = setup.model
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                # SyncBatchNorm needs a GPU. BatchNorm keeps the same memory, except for statistics.
                module.forward = MethodType(_BatchNorm.forward, module)  # type: ignore[method-assign]
        if self.strategy == "ddp":
            return setup
        if isinstance(setup.optimizer, Optimizer):
            raise StepError(
                "the optimizer was made before the model states are sharded. Try a factory such as "
                "lambda parameters: SGD(parameters), or the optimizer's name."
            )
        if self.is_sharded:
            shard(model, mesh, precision, keep_gathered=self.strategy == "zero2")
            return setup
        if isinstance(setup.optimizer, OptimizerOfModel):
            raise StepError(
                f"{setup.optimizer.source} uses all parameters, but each rank has only a part of "
                "them. Try the optimizer's name or a factory."
            )
        part = nn.ParameterList(largest_part(list(model.parameters()), self.world_size))
        return dataclasses.replace(setup, optimizer=make_optimizer(setup.optimizer, part))

    def buckets(self, model: nn.Module) -> list[Tensor]:
        """Return the buffers in which DistributedDataParallel reduces gradients."""
        if self.is_sharded:
            return []
        left = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        buckets = []
        size = FIRST_BUCKET_BYTES
        while left > 0:
            buckets.append(torch.empty(min(size, left), dtype=torch.uint8))
            left, size = left - size, BUCKET_BYTES
        return buckets


def largest_part(parameters: list[nn.Parameter], parts: int) -> list[nn.Parameter]:
    """Split the parameters as ``ZeroRedundancyOptimizer`` does, and return the largest part.

    Each parameter stays whole. The largest come first, each to the part with the fewest elements.
    https://docs.pytorch.org/docs/stable/distributed.optim.html
    """
    shares: list[list[nn.Parameter]] = [[] for _ in range(min(parts, len(parameters)))]
    loads = [0] * len(shares)
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        least = loads.index(min(loads))
        shares[least].append(parameter)
        loads[least] += parameter.numel()
    return shares[loads.index(max(loads))]


def _parts_made_when_needed() -> AbstractContextManager[Any]:
    """Make sharding create only this rank's part of each parameter, not the parts of all ranks.

    Otherwise the time of an estimate grows with the number of ranks. Does nothing if this version
    of PyTorch has no such function to replace.
    """
    # The function's __module__ is the public module. The wrapped function's is the real one.
    home = inspect.unwrap(fully_sharding().fully_shard).__module__.rpartition(".")[0]
    sharded = getattr(import_module(home), "_fsdp_param", None)
    if not hasattr(sharded, "_chunk_with_empty"):
        return nullcontext()
    return replaced(sharded, _chunk_with_empty=_Parts)


class _Parts:
    """The parts of a tensor along a dimension, as from ``torch.chunk``, made on access."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        length = self._tensor.shape[self._dim]
        start = index * self._size
        if start >= length:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, length - start))


def resizes_tracked(tracker: StorageTracker) -> AbstractContextManager[Any]:
    """Report to a tracker when sharding releases or allocates the memory of gathered parameters.

    Sharding resizes storages directly, so the tracker sees no operator.
    """
    resize = torch.UntypedStorage.resize_

    def tracked(storage: torch.UntypedStorage, size: Any) -> Any:
        result = resize(storage, size)
        tracker.resized(storage)
        return result

    return replaced(torch.UntypedStorage, resize_=tracked)
