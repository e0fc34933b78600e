"""Choose the prober for a call of ``find_max_batch``: in this process, or in forks of it."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from batchfinder.errors import UsageError
from batchfinder.probing.devices.choose_device import choose_device
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.child import serve_fork
from batchfinder.probing.workers.fork import ForkedProcess, obstacle_to_forks
from batchfinder.probing.workers.here import Here
from batchfinder.probing.workers.process import WorkerProcess
from batchfinder.probing.workers.process_worker import ProcessWorker
from batchfinder.probing.workers.setup_source import SetupSource, is_worker
from batchfinder.probing.workers.supervisor import Supervisor
from batchfinder.training.parallel import is_sharded, ranks, waits_within_passes
from batchfinder.training.setup import TrainingSetup

if TYPE_CHECKING:
    from batchfinder.probing.ranks.in_process import InProcessRankProber

_HERE_WARNING = (
    "sizes are tried in this process, because {}. On the CPU, an out-of-memory "
    "error leaves holes in its memory, so the answer may be too small. Try batchfinder find"
)

_TORCHRUN = "torchrun --nproc-per-node N -m batchfinder find FILE.py:FUNCTION --strategy"


def choose_prober(
    setup: TrainingSetup, options: ProbeOptions, source: SetupSource | None = None
) -> Supervisor | InProcessRankProber:
    """Return the prober for a setup of this process.

    On accelerators, sizes are tried in this process. On the CPU, an out-of-memory error spoils its
    process, so sizes are tried in forks of this process if it can be forked, or in new processes
    that load the setup from its source, if it has one.

    Raises:
        UsageError: this is a worker itself, or the strategy cannot be used in this process.
        BatchFinderError: the prober could not start.
    """
    if is_worker():
        raise UsageError(
            "the code that a search loads to try sizes starts a search itself. Try moving that "
            "under if __name__ == '__main__', so that the file can be imported."
        )
    if options.strategy is not None:
        return _choose_for_ranks(setup, options)
    is_spoilt = not choose_device(options.device, setup.model).leaves_no_trace
    obstacle = obstacle_to_forks() if is_spoilt else ""
    if is_spoilt and not obstacle:
        launch = lambda: WorkerProcess(False, ForkedProcess(partial(serve_fork, setup)))  # noqa: E731
        return Supervisor(ProcessWorker(launch), options)
    if is_spoilt and source is not None:
        return Supervisor(ProcessWorker(lambda: WorkerProcess(False), source), options)
    prober = Supervisor(Here(setup), options)
    if is_spoilt:
        prober.notes.add(_HERE_WARNING.format(f"it cannot be forked: {obstacle}"))
    return prober


def strategy_of_this_job(model: object) -> str | None:
    """Return the strategy of the current process group for a model; None if it trains alone."""
    if not isinstance(model, nn.Module) or ranks() == 1:
        return None
    return "fsdp" if is_sharded(model) else "ddp"


def _choose_for_ranks(setup: TrainingSetup, options: ProbeOptions) -> InProcessRankProber:
    # Imported here, so that builds of PyTorch without torch.distributed work for one process.
    from batchfinder.probing.ranks.in_process import InProcessRankProber
    from batchfinder.probing.ranks.meeting import open_meeting

    why, strategy = waits_within_passes(setup.model)
    if why:
        raise UsageError(
            f"the model {why}, and a rank out of memory in its collectives would hang this job. "
            f"Try {_TORCHRUN} {strategy} with the function that builds it, or batchfinder run on "
            "the script."
        )
    if options.strategy == "fsdp":
        raise UsageError(
            "a rank out of memory in the collectives of fsdp would hang this job. "
            f"Try {_TORCHRUN} fsdp with the function that builds the model."
        )
    meeting = open_meeting()
    device = choose_device(options.device, setup.model)
    is_spoilt = not device.leaves_no_trace
    own = [socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES"), str(device.torch_device)]
    if device.torch_device.type == "cuda":  # nodes may have the same name
        properties = torch.cuda.get_device_properties(device.torch_device)
        own.append(str(getattr(properties, "uuid", "")))
    seen = meeting.gather([is_spoilt, own])
    # If one rank has to warn, all ranks warn.
    is_spoilt = any(one for one, _ in seen)
    if device.torch_device.type != "cpu":
        if len({tuple(place) for _, place in seen}) < len(seen):
            raise UsageError(
                f"several ranks of a machine would use one device, as {device.torch_device} here. "
                "Try torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) when the script starts"
            )
        # The first collective allocates buffers on the device, before its memory is measured.
        dist.all_reduce(torch.ones(1, device=device.torch_device))
    prober = InProcessRankProber(setup, options, meeting)
    if is_spoilt:
        prober.notes.add(_HERE_WARNING.format("a rank of a script cannot be forked"))
    return prober
