"""Join the process group in which the workers of all ranks train, from one worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from batchfinder.errors import DeviceError, UsageError
from batchfinder.probing.devices.choose_device import accelerator, parse_device
from batchfinder.probing.devices.device import Device, DeviceMemory
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.ranks.job import Job
from batchfinder.training.sample import BatchMaker
from batchfinder.training.setup import TrainingSetup
from batchfinder.training.tree import named_tensors

# The backend of torch.distributed for each kind of accelerator. Others use gloo.
_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
# Time limit to connect to the store of the groups.
_CONNECTING_SECONDS = 60.0


@dataclass(frozen=True)
class GroupInvitation:
    """The data that a worker needs to join a group.

    Attributes:
        name: the name of the group, unique in a search.
        host: the host of the store that all groups use.
        port: the port of that store.
        accelerator: the number of the worker's accelerator among those that it sees.
        job: the rank of the worker, and the number of workers in the group.
    """

    name: str
    host: str
    port: int
    accelerator: int
    job: Job

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GroupInvitation:
        """Return the invitation from the data of :func:`dataclasses.asdict`."""
        return cls(**{**data, "job": Job(**data["job"])})


def join(invitation: GroupInvitation, asked: str | None) -> str:
    """Create the default process group together with the other workers.

    This waits for all workers. If one does not come, the parent ends this process.

    Returns the device of this rank. It is of the kind asked for; None chooses it.

    Raises:
        DeviceError: the backend fails, such as NCCL.
    """
    device = device_of_rank(asked, invitation.accelerator)
    kind = torch.device(device).type
    if kind != "cpu":
        torch.get_device_module(kind).set_device(device)
    # Imported here, because some builds of PyTorch lack them; a single process does not need them.
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        invitation.host,
        invitation.port,
        is_master=False,
        timeout=timedelta(seconds=_CONNECTING_SECONDS),
    )
    # The workers also vote on their next action through host memory, on any device.
    backend = f"cpu:gloo,{kind}:{_BACKENDS[kind]}" if kind in _BACKENDS else "gloo"
    dist.init_process_group(
        backend,
        store=PrefixStore(invitation.name, store),
        rank=invitation.job.rank,
        world_size=invitation.job.world_size,
    )
    # The first collective allocates buffers, also on the device. Run one before memory is
    # measured.
    try:
        dist.all_reduce(torch.ones(1, device=device))
    except dist.DistError as error:
        reason = str(error).rstrip().rpartition("\n")[2]
        raise DeviceError(
            f"the ranks cannot exchange data on {kind} ({reason}). Try NCCL_DEBUG=INFO to see more"
        ) from None
    return device


def all_agree(yes: bool) -> bool:
    """Return True if every rank of the group says yes."""
    votes = torch.tensor([int(yes)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def device_of_rank(asked: str | None, number: int) -> str:
    """Return the device of one rank: the accelerator with that number, or the CPU.

    Raises:
        UsageError: a numbered device was requested, which all ranks would share.
        DeviceError: the machine has fewer accelerators than ranks.
    """
    device = parse_device(asked) if asked else accelerator() or torch.device("cpu")
    if device.index is not None:
        raise UsageError(
            f"all ranks would share {asked}. Try --device {device.type}, for a device each"
        )
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda" and torch.cuda.is_available():
        there = torch.cuda.device_count()
        if number >= there:
            raise DeviceError(
                "there are more ranks than CUDA devices on this machine. Try at most "
                f"--nproc-per-node {there}"
            )
    return f"{device.type}:{number}"


def accelerator_number(job: Job, seen: Sequence[tuple[str, str]]) -> int:
    """Return the number of a rank's own accelerator among those that the rank sees.

    Args:
        job: the job as this rank sees it.
        seen: by rank, its host name and the accelerators that its environment makes visible; ""
            for all.

    Returns:
        The local rank, as with torchrun. It is 0 if the launcher shows each rank of the machine a
        different accelerator first, as Slurm does with ``--gpus-per-task``.
    """
    machine = seen[job.rank][0]
    first_ones = [visible.partition(",")[0] for host, visible in seen if host == machine]
    shows_own = all(first_ones) and len({*first_ones}) == len(first_ones)
    return 0 if shows_own else job.local_rank


def shared(
    memory: DeviceMemory, options: ProbeOptions, ranks: int
) -> tuple[DeviceMemory, ProbeOptions]:
    """Return one rank's share of a memory, and of its limit, that several ranks share."""
    limit = options.memory_limit
    options = replace(options, memory_limit=None if limit is None else limit // ranks)
    capacity, others = memory.capacity_bytes // ranks, memory.used_by_others_bytes // ranks
    memory = replace(memory, capacity_bytes=capacity, used_by_others_bytes=others, ranks=ranks)
    return memory, options


def facts_of(setup: TrainingSetup, batches: BatchMaker, device: Device) -> dict[str, str]:
    """Return the facts that must be equal on all ranks that train together, in words."""
    parameters = list(setup.model.parameters())
    # Ranks have other parts of the data, so their samples may differ in number and in length.
    example = named_tensors(batches.make(1)) if batches.batch_size is not None else []
    kinds = [f"{path} {one.dtype} of {one.dim()} dimensions".strip() for path, one in example]
    return {
        "the kind of device": device.torch_device.type,
        "the model": f"{type(setup.model).__name__} with {len(parameters)} parameter tensors of "
        f"{sum(parameter.numel() for parameter in parameters)} elements",
        "the sample": ", ".join(kinds) or "a function",
    }
