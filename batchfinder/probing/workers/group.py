"""The process group that the workers of all ranks train in, as each of them sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from batchfinder.errors import DeviceError, UsageError
from batchfinder.probing.devices.choose import accelerator
from batchfinder.probing.devices.device import Device, DeviceMemory
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.ranks.job import Job
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.tree import named_tensors

_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
_CONNECTING_SECONDS = 60.0


@dataclass(frozen=True)
class GroupInvitation:
    """What a worker has to know to join a group, as plain data.

    Attributes:
        name: of the group; no two of a search are the same.
        host: where the store of the groups is.
        port: of that store.
        rank: the worker's rank.
        world_size: how many workers join.
        accelerator: the number of the accelerator that it gets.
        local_world_size: how many share this machine.
    """

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    accelerator: int
    local_world_size: int

    def to_dict(self) -> dict[str, Any]:
        """The invitation, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GroupInvitation:
        """The inverse of :meth:`to_dict`."""
        return cls(**data)


def join_as_rank(invitation: GroupInvitation, options: ProbeOptions) -> ProbeOptions:
    """Join the group, on the device of this rank; the options, with that device."""
    device = device_of_rank(options.device, invitation.accelerator)
    join(invitation, device)
    return replace(options, device=device)


def join(invitation: GroupInvitation, device: str) -> None:
    """Make the default process group of this process together with the other workers.

    Waits for all of them: whoever started this process ends it if one does not come.
    """
    kind = torch.device(device).type
    if kind != "cpu":
        torch.get_device_module(kind).set_device(device)
    # Not at the top: some builds of PyTorch have none, and need none for a single process.
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        invitation.host,
        invitation.port,
        is_master=False,
        timeout=timedelta(seconds=_CONNECTING_SECONDS),
    )
    # Verdicts on what the workers do next go through the host, whatever the device is.
    backend = f"cpu:gloo,{kind}:{_BACKENDS[kind]}" if kind in _BACKENDS else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore(invitation.name, store),
        rank=invitation.rank,
        world_size=invitation.world_size,
    )
    # What the first collective sets up, buffers on the device among it, is there before any
    # memory is measured.
    dist.all_reduce(torch.ones(1, device=device))


def all_agree(yes: bool) -> bool:
    """Whether every rank of the group says yes."""
    votes = torch.tensor([int(yes)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def device_of_rank(asked: str | None, number: int) -> str:
    """The device of one rank: the accelerator of that number, or the CPU.

    Raises:
        UsageError: one device was asked for by its number, which all ranks would share.
        DeviceError: the machine has fewer accelerators than ranks.
    """
    try:
        device = torch.device(asked) if asked else accelerator() or torch.device("cpu")
    except RuntimeError:
        raise UsageError(f"there is no device {asked!r}; write it as cpu or cuda") from None
    if device.index is not None:
        raise UsageError(
            f"each rank has a device of its own: write --device {device.type}, not {asked}"
        )
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda" and torch.cuda.is_available():
        there = torch.cuda.device_count()
        if number >= there:
            raise DeviceError(
                f"there are more ranks than CUDA devices on this machine; start it with at most "
                f"--nproc-per-node {there}"
            )
    return f"{device.type}:{number}"


def accelerator_number(job: Job, seen: Sequence[tuple[str, str]]) -> int:
    """Which of the accelerators that a rank sees is its own.

    Args:
        job: the rank's.
        seen: each rank's machine, and what its environment says that it sees: "" for all.

    Returns:
        Its number on the machine, as torchrun sees to it; 0 where the launcher shows every rank
        another one first, as Slurm does with ``--gpus-per-task``.
    """
    machine = seen[job.rank][0]
    first_ones = [visible.partition(",")[0] for host, visible in seen if host == machine]
    shows_own = all(first_ones) and len({*first_ones}) == len(first_ones)
    return 0 if shows_own else job.local_rank


def shared(
    memory: DeviceMemory, options: ProbeOptions, ranks: int
) -> tuple[DeviceMemory, ProbeOptions]:
    """What one of several ranks has of a memory, and of a limit, that they share."""
    limit = options.memory_limit
    options = replace(options, memory_limit=None if limit is None else limit // ranks)
    capacity, others = memory.capacity_bytes // ranks, memory.used_by_others_bytes // ranks
    return replace(memory, capacity_bytes=capacity, used_by_others_bytes=others), options


def facts_of(setup: TrainingSetup, batches: BatchMaker, device: Device) -> dict[str, str]:
    """What ranks that train together have to have in common, in words."""
    parameters = list(setup.model.parameters())
    # Of one example: the samples of two ranks may well be batches of different sizes.
    example = named_tensors(batches.make(1)) if batches.batch_size is not None else []
    shapes = [f"{path} {tensor.dtype} {[*tensor.shape]}".strip() for path, tensor in example]
    return {
        "the kind of device": device.torch_device.type,
        "the model": f"{type(setup.model).__name__} with {len(parameters)} parameter tensors of "
        f"{sum(parameter.numel() for parameter in parameters)} elements",
        "the sample": ", ".join(shapes) or "a function",
    }
