"""Which of the processes of a job this one is. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """This process among the others of its job.

    Attributes:
        rank: its number, from 0.
        world_size: how many there are.
        local_rank: its number on this machine.
        local_world_size: how many share this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> Job:
        """Read what torchrun says; without torchrun, a job of one.

        https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if not all(os.environ.get(name, "").isdigit() for name in names):
            return cls()
        return cls(*(int(os.environ[name]) for name in names))
