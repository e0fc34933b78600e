"""In this process or in workers: which prober a call of ``find_max_batch`` gets."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import chain

import torch.distributed as dist
from torch import nn

from batchfinder.errors import UsageError
from batchfinder.probing.devices.choose import choose_device
from batchfinder.probing.devices.device import Device
from batchfinder.probing.in_process import InProcessProber
from batchfinder.probing.options import ProbeOptions
from batchfinder.probing.workers.own_fork import can_be_forked
from batchfinder.probing.workers.pickled_setup import pickle_setup
from batchfinder.probing.workers.prober import WorkerProber
from batchfinder.probing.workers.source import SetupSource, is_worker
from batchfinder.search.prober import Prober
from batchfinder.training.parallel import is_sharded, unwrapped
from batchfinder.training.setup import TrainingSetup
from batchfinder.units import MIB, format_bytes

_HERE_WARNING = (
    "sizes are tried in this process, as {}: an out-of-memory on the CPU leaves holes in its "
    "memory, and the answer may be too small; batchfinder find does better"
)

# A sample, say, takes less.
_WORTH_TELLING_BYTES = 64 * MIB


def choose_prober(setup: TrainingSetup, options: ProbeOptions, *, isolate: bool) -> Prober:
    """The prober for a setup.

    Args:
        setup: what to train.
        options: of the search.
        isolate: whether the user asks for worker processes. On devices where an out-of-memory
            spoils the process that it happens in, they are chosen anyway where they can be:
            forks of this process, which hold all that it holds, else processes of their own.

    Raises:
        UsageError: isolation was asked for, and the setup cannot be sent to another process; or
            this is a worker.
        BatchFinderError: see the probers.
    """
    if is_worker():
        raise UsageError(
            "the code that a search has loaded to try sizes starts a search itself; keep that "
            "under if __name__ == '__main__', so that the file can be imported"
        )
    if options.strategy is not None:
        return _choose_for_ranks(setup, options, isolate)
    device = choose_device(options.device, setup.model)
    if not isolate and device.leaves_no_trace:
        return InProcessProber(setup, options)
    if not device.leaves_no_trace and can_be_forked():
        return WorkerProber(SetupSource(own_setup=setup), options)
    # A worker would choose by its own current device, and by the model's, which may lie elsewhere.
    options = replace(_inherited(device, options), device=str(device.torch_device))
    try:
        source = SetupSource(pickled_setup=pickle_setup(setup))
        held = _held_here(device, options)
        worker_prober = WorkerProber(source, options)
        worker_prober.warn(*held)
        return worker_prober
    except UsageError as error:
        if isolate:
            raise
        problem = error
    prober = InProcessProber(setup, options)
    prober.warn(_HERE_WARNING.format(problem))
    return prober


def strategy_of_this_job(model: object) -> str | None:
    """How the ranks of the process group that there is will train a model; None: there is none."""
    if (
        not isinstance(model, nn.Module)
        or not dist.is_available()
        or not dist.is_initialized()
        or dist.get_world_size() == 1
    ):
        return None
    return "fsdp" if is_sharded(model) else "ddp"


def _inherited(device: Device, options: ProbeOptions) -> ProbeOptions:
    """The options, with the limit that the user has set for this process, for its workers."""
    if device.allowed_share() == 1:
        return options
    memory = device.memory()
    allowed = memory.capacity_bytes - memory.used_by_others_bytes
    return replace(options, memory_limit=min(options.memory_limit or allowed, allowed))


def _held_here(device: Device, options: ProbeOptions) -> list[str]:
    """A warning if this process holds memory that its workers on the same device would use."""
    if not device.leaves_no_trace:
        return []  # that of other processes is none of the limit's
    gc.collect()
    device.release_cache()
    if device.held_bytes() < _WORTH_TELLING_BYTES:
        return []
    memory = device.memory()
    left = memory.capacity_bytes - memory.used_by_others_bytes - memory.held_bytes
    if options.memory_limit is not None and options.memory_limit <= left - memory.context_bytes:
        return []
    return [
        f"this process holds {format_bytes(memory.held_bytes)} of {device.torch_device} itself, "
        "which the workers that sizes are tried in cannot use: build model and sample on the CPU, "
        "or leave isolate=True away, for a larger answer"
    ]


def _choose_for_ranks(setup: TrainingSetup, options: ProbeOptions, isolate: bool) -> Prober:
    # Not at the top: builds of PyTorch without torch.distributed work for a single process.
    from batchfinder.probing.ranks.in_process import InProcessRankProber
    from batchfinder.probing.ranks.meeting import open_meeting
    from batchfinder.probing.ranks.prober import RankProber

    if is_sharded(setup.model):
        raise UsageError(
            "the model is sharded already, and a rank out of memory in its collectives would hang "
            "this job; give the model before fully_shard with strategy='fsdp', or the function "
            "that builds it to torchrun -m batchfinder find FILE.py:FUNCTION --strategy fsdp"
        )
    meeting = open_meeting()
    device = choose_device(options.device, setup.model)
    wants_workers = isolate or options.strategy == "fsdp" or not device.leaves_no_trace
    pickled, problem = b"", ""
    if wants_workers:
        try:
            pickled = pickle_setup(replace(setup, model=unwrapped(setup.model)))
        except UsageError as error:
            problem = str(error)
    # One rank that cannot send its setup to a worker keeps all of them from it.
    problem = next(filter(None, meeting.gather(problem)), "")
    if problem and (isolate or options.strategy == "fsdp"):
        raise UsageError(problem)
    meeting.agree({"whether to try sizes in workers": wants_workers})
    if pickled and not problem:
        # Each rank's worker finds its own device, as the rank itself did.
        options = replace(_inherited(device, options), device=device.torch_device.type)
        source = SetupSource(pickled_setup=pickled)
        held = meeting.gather(_held_here(device, options))
        rank_prober = RankProber(source, options, meeting)
        rank_prober.warn(*chain.from_iterable(held))
        return rank_prober
    prober = InProcessRankProber(setup, options, meeting)
    if problem:
        prober.warn(_HERE_WARNING.format(problem))
    return prober
