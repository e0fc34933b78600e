"""The rank of this process in its job. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


def sharing(device: str, ranks: int) -> str:
    """Return a device's name, and that several ranks share its memory and its limit."""
    return f"{device}, each with 1/{ranks} of the memory" if ranks > 1 else device


@dataclass(frozen=True)
class Job:
    """The rank of a process, and the size of its job.

    Attributes:
        rank: the number of this process in the job, from 0.
        world_size: the number of processes in the job.
        local_rank: the number of this process on its machine, from 0.
        local_world_size: the number of processes of the job on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Job:
        """Read torchrun's environment variables. Without torchrun, return a job of one process.

        https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if not all(os.environ.get(name, "").isdigit() for name in names):
            return cls()
        return cls(*(int(os.environ[name]) for name in names))
