"""What the ranks of one training agree on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter


def ranks() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def unsynchronized(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the context of a backward pass that does not average the gradients.

    A rank that runs out of memory while they are averaged would leave the others waiting.
    """
    no_sync = getattr(model, "no_sync", None)
    return no_sync() if no_sync is not None and ranks() > 1 else nullcontext()


def least_of_ranks(values: Sequence[int], device: torch.device) -> list[int]:
    """Return the smallest that any rank has, of each value."""
    least = torch.tensor(values, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return [int(value) for value in least.tolist()]


def average_gradients(parameters: Iterable[Parameter], device: torch.device) -> None:
    """Average the gradients over all ranks.

    A rank that has not used a parameter counts as a gradient of zeros, as in
    DistributedDataParallel. A parameter that no rank has used keeps None.
    """
    every = list(parameters)
    unused = least_of_ranks([parameter.grad is None for parameter in every], device)
    gradients = []
    for parameter, is_unused in zip(every, unused, strict=True):
        if not is_unused:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
    torch._foreach_div_(gradients, float(ranks()))
