"""What the ranks of one training agree on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from batchfinder.errors import RankError
from batchfinder.training.parallel import ranks

# Ranks that train together are within a step of each other. A rank that has not ended its call this
# many seconds after another ran out of memory most likely waits for it in a collective.
ANOTHER_SECONDS = 60.0


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


def collectives_begun() -> int:
    """Return the number of collectives that this process has begun; 0 if backends do not count."""
    if ranks() == 1:
        return 0
    try:
        groups: list[Any] = [*dist.distributed_c10d._world.pg_map]
        backends = [group._get_backend(kind) for group in groups for kind in group._device_types]
        return sum(backend._get_sequence_number_for_group() for backend in backends)
    except (AttributeError, RuntimeError):
        return 0


def reason_of_any_rank(reason: str, batch_size: int) -> str:
    """Return why a call at a batch size failed on any rank; "" if all ranks have ended it well.

    ``reason`` is the out-of-memory error of this rank; "" without one.

    Raises:
        RankError: ranks that ran out of memory cannot go on with the others.
    """
    from batchfinder.probing.ranks.meeting import open_meeting

    begun = collectives_begun()
    try:
        # A rank that trained to its end waits for as long as another takes to save its results.
        meeting = open_meeting(ANOTHER_SECONDS if reason else math.inf)
        said = meeting.gather([reason, begun])
    except RankError:
        if not reason:
            raise
        said = [[reason, begun], ["", None]]
    failed = [text for text, _ in said if text]
    if failed and any(other != begun for _, other in said):
        raise RankError(
            f"a rank ran out of memory at batch size {batch_size} ({failed[0]}) while others wait "
            "for it in a collective, from which they cannot return. Try a starting_batch_size that"
            " `batchfinder run -- accelerate launch train.py --batch-size {batch_size}` confirmed"
        )
    return reason or next(iter(failed), "")
